"""NCCL collectives on device tensors, enqueued on the communicator's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.device.stream_interfaces import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import empty, zeros
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.means import scaled, split_divisor
from asyncddp.transport.base import COLLECTIVE_GIVEN_UP, Request, Transport, collectives_broken
from asyncddp.transport.cuda.nccl.communicator import BYTE, NCCLCall, NCCLCommunicator, nccl_group

_SUM, _MAX = 0, 2
_CODES: dict[torch.dtype, tuple[int, int, int]] = {
    torch.bool: (1, 1, _MAX),
    torch.int8: (0, 1, _SUM),
    torch.uint8: (1, 1, _SUM),
    torch.int32: (2, 1, _SUM),
    torch.int64: (4, 1, _SUM),
    torch.float16: (6, 1, _SUM),
    torch.float32: (7, 1, _SUM),
    torch.float64: (8, 1, _SUM),
    torch.bfloat16: (9, 1, _SUM),
    torch.complex64: (7, 2, _SUM),
    torch.complex128: (8, 2, _SUM),
}
"""NCCL type code, number of such values per element, and reduction, keyed by dtype."""

_WARM_UP_BYTES = (1 << 4, 1 << 18, 1 << 23, 1 << 26)  # bytes: NCCL chooses how to sum by the size


def has_sum(dtype: torch.dtype) -> bool:
    """Return whether NCCL can sum tensors of a dtype.

    Example:
        >>> has_sum(torch.bfloat16), has_sum(torch.int16)
        (True, False)
    """
    return dtype in _CODES


class _CollectiveRequest:
    """Request of an NCCL collective; complete once all ranks have enqueued it.

    Work enqueued on the compute stream afterwards follows it; the host does not wait for a device.
    """

    def __init__(
        self, owner: NCCLCollectives, what: str, event: DeviceEvent, entered: Request
    ) -> None:
        self._owner, self.what, self.event, self.entered = owner, what, event, entered
        self.complete = False

    def done(self) -> bool:
        """Return whether all ranks have enqueued it; raise a PeerError after an NCCL error."""
        self._owner.raise_if_failed()
        self._owner.advance()
        return self.complete

    def abandon(self) -> None:
        """Abort the communicator unless all ranks have enqueued it, so that the device proceeds."""
        if not self.complete:
            self.entered.abandon()
            self._owner.communicator.abort(COLLECTIVE_GIVEN_UP)


class NCCLCollectives:
    """NCCL collectives among the ranks of one communicator.

    A barrier of a host transport determines when all ranks have enqueued a collective.
    """

    def __init__(
        self, streams: DeviceStreams, nccl: Any, communicator: NCCLCommunicator, host: Transport
    ) -> None:
        self._streams, self._nccl, self.communicator = streams, nccl, communicator
        self._host, self._rank, self._size = host, host.rank, host.size
        self._entered: deque[_CollectiveRequest] = deque()  # by this rank, not known to be by all

    def raise_if_failed(self) -> None:
        """Raise a PeerError with the reason if the communicator is broken."""
        why = self.communicator.failed()
        if why is not None:
            raise collectives_broken(why)

    def advance(self) -> None:
        """Complete the collectives that all ranks have enqueued, in order."""
        while self._entered and self._entered[0].entered.done():
            request = self._entered.popleft()
            self.communicator.order_compute(request.what, request.event)
            request.complete = True

    def _enter(self, what: str, call: NCCLCall, tensors: Sequence[torch.Tensor]) -> Request:
        self.raise_if_failed()
        before = [self._streams.record_event(StreamRole.COMPUTE)]
        try:
            event = self.communicator.enter(what, call, tensors, before)
        except PeerError:
            self.raise_if_failed()
            raise
        self._entered.append(_CollectiveRequest(self, what, event, self._host.ibarrier()))
        return self._entered[-1]

    def reduce(
        self, what: str, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Enqueue an ``allreduce`` or ``reduce_scatter``, and the division of its sum."""
        code, width, operation = _CODES[tensor.dtype]
        (scale, rest), given = split_divisor(divisor), tensor
        if scale != 1:
            self.raise_if_failed()
            whole = what == "allreduce"
            with self._streams.stream_context(StreamRole.COMPUTE):
                room = out if whole else empty(tensor.shape, tensor.dtype, tensor.device)
                given = scaled(tensor, scale, room)

        def call(handle: Any, stream: int) -> None:
            if out.numel():
                reduce = handle.allReduce if what == "allreduce" else handle.reduceScatter
                count = out.numel() * width
                reduce(given.data_ptr(), out.data_ptr(), count, code, operation, stream)
            if rest != 1:
                out.div_(rest)

        return self._enter(what, call, [given, out])

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Enqueue an ``ncclBroadcast`` of the tensor's bytes."""
        flat = as_bytes(tensor)

        def call(handle: Any, stream: int) -> None:
            if flat.numel():
                start = flat.data_ptr()
                handle.broadcast(start, start, flat.numel(), BYTE, root, stream)

        return self._enter("broadcast", call, [tensor])

    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Enqueue an ``ncclAllGather`` of bytes, or grouped broadcasts if sizes differ."""
        own, whole, size = as_bytes(tensor), as_bytes(out), tensor.element_size()

        def call(handle: Any, stream: int) -> None:
            start = whole.data_ptr()
            if len(set(counts)) == 1:
                if own.numel():
                    handle.allGather(own.data_ptr(), start, own.numel(), BYTE, stream)
                return
            with nccl_group(self._nccl):
                for root, count in enumerate(counts):
                    given = own.data_ptr() if root == self._rank else start
                    if count:
                        handle.broadcast(given, start, count * size, BYTE, root, stream)
                    start += count * size

        return self._enter("allgather", call, [tensor, out])

    def warm_up(self) -> Request:
        """Run each collective in several sizes, to set up NCCL's connections; collective.

        NCCL may connect ranks in the first call that needs the connection. The calling thread then
        waits for the other ranks: forever, if these first need something of this rank.
        """
        with self._streams.stream_context(StreamRole.COMPUTE):
            for size in _WARM_UP_BYTES:
                count = max(1, size // 4 // self._size)
                whole = zeros((count * self._size,), torch.float32, self._streams.device)
                part = zeros((count,), torch.float32, self._streams.device)
                self.reduce("allreduce", whole, whole)
                self.reduce("reduce_scatter", whole, part)
                self.iallgather(part, whole, [count] * self._size)
                last = self.ibroadcast(whole, 0)
        return last
