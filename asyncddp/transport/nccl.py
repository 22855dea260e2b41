"""``nccl``: collectives of tensors on GPUs by NCCL, through cupy, out of the tensors' own memory.

Messages between two ranks are staged as in ``cuda_staged``. NCCL's send and receive match by their
order, and two of its communicators must not be at work at once unless all ranks start them in one
order; neighbour verbs match by name and in any order, so that NCCL's own messages could stand still
for ever. Collectives are submitted in one order already. Not run on a GPU yet; tests run it over a
library that checks what it is handed and does on the host what NCCL does on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncddp.errors import ArgumentError, EnvironmentProblem, PeerError
from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_staged import CudaStaged

__all__ = ["NCCL", "library", "versions"]

_ID_BYTES = 128
_SUM, _MAX = 0, 2
_BYTE = 1
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
"""For each dtype NCCL's number of it, how many such make an element, and what forms its sum."""


def library() -> Any:
    """Cupy's module of NCCL.

    Raises:
        EnvironmentProblem: cupy is not there, or has no NCCL.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as problem:
        raise EnvironmentProblem(
            f"NCCL is reached through cupy, which cannot be imported ({problem}); install it with "
            "pip install 'asyncddp[cuda12]' or 'asyncddp[cuda13]'"
        ) from problem
    if not nccl.available:
        raise EnvironmentProblem(
            "cupy has found no NCCL; install the wheel that fits its CUDA: pip install "
            "nvidia-nccl-cu12 or nvidia-nccl-cu13"
        )
    return nccl


def versions() -> tuple[str | None, int | None]:
    """Versions of cupy and of its NCCL; None for what is not there."""
    try:
        import cupy
    except ImportError:
        return None, None
    try:
        return str(cupy.__version__), int(library().get_version())
    except EnvironmentProblem:
        return str(cupy.__version__), None


class _Entered:
    """A collective that this rank has entered; done once the device has done its part."""

    def __init__(self, wire: NCCL, event: Event, keep: Sequence[torch.Tensor]) -> None:
        self._wire, self._event, self._keep = wire, event, keep

    def done(self) -> bool:
        """Ask the event; where it has not come, ask NCCL for what went wrong."""
        if self._event.done():
            return True
        self._wire.raise_if_failed()
        return False

    def abandon(self) -> None:
        """Give it up: the communicator is aborted, so that the device goes on."""
        self._wire.abort_group("an earlier collective was given up while some ranks had not joined")


class NCCL(CudaStaged):
    """A wire for tensors on GPUs whose collectives are NCCL's.

    They run on a stream of their own (the queue GROUP), after the work that was queued before.

    Args:
        base: The wire for tensors on the host, between the same ranks.
        streams: Of the device.
        nccl: cupy's module of NCCL.
        comm: A communicator of all ranks.

    References:
        NCCL's documentation, "Using multiple NCCL communicators concurrently" and "Types"; cupy's,
        ``cupy.cuda.nccl.NcclCommunicator``.
    """

    name = "nccl"

    def __init__(self, base: Transport, streams: DeviceStreams, nccl: Any, comm: Any) -> None:
        super().__init__(base, streams)
        self._nccl, self._comm = nccl, comm
        self._why: str | None = None

    @classmethod
    def open(
        cls, base: Transport, streams: DeviceStreams, timeout: float, nccl: Any = None
    ) -> NCCL:
        """Make the wire, with a communicator of all ranks of ``base``; collective.

        Args:
            base: The wire for tensors on the host.
            streams: Of the device.
            timeout: Seconds for the ranks to exchange the communicator's identity.
            nccl: cupy's module of NCCL, or what has its interface.

        Raises:
            EnvironmentProblem: There is no NCCL, or it refuses this group.
        """
        nccl = library() if nccl is None else nccl
        own = nccl.get_unique_id() if base.rank == 0 else (0,) * _ID_BYTES
        identity = torch.tensor(own, dtype=torch.int16)
        base.broadcast(identity, 0, timeout)
        try:
            with streams.working(Queue.GROUP):  # which makes its device the current one
                comm = nccl.NcclCommunicator(base.size, tuple(identity.tolist()), base.rank)
        except RuntimeError as problem:
            raise EnvironmentProblem(
                f"rank {base.rank}: NCCL makes no communicator of {base.size} ranks ({problem}). "
                "It refuses two ranks on one GPU; leave it out of ASYNCDDP_DEVICE_WIRES then"
            ) from problem
        return cls(base, streams, nccl, comm)

    def for_device(self, streams: DeviceStreams) -> Transport:
        """This wire, for tensors on its device; for the host's a staged one.

        Raises:
            ArgumentError: Another device of this rank.
        """
        if streams.device == self.streams.device:
            return self
        if streams.device.type == "cpu":
            return CudaStaged(self.base, streams)
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, where NCCL has its "
            f"communicator, got one on {streams.device}; use the GPU of that number, local_rank() "
            "modulo the visible ones, or leave nccl out of ASYNCDDP_DEVICE_WIRES"
        )

    def split(self, color: int, key: int) -> Transport:
        """Split the wire beneath; its parts are staged."""
        return CudaStaged(self.base.split(color, key), self.streams, self.pool)

    def close(self) -> None:
        """Give the communicator back, and close the wire beneath."""
        if self._why is None:
            self._why = "it was closed"
            self._comm.destroy()
        super().close()

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """``ncclAllReduce``; dtypes that NCCL has not are staged."""
        found, into = _CODES.get(tensor.dtype), tensor if out is None else out
        if found is None:
            return super().iallreduce(tensor, out, divisor)
        code, width, operation = found

        def enter(stream: int) -> None:
            """Enter the call into a stream."""
            count = tensor.numel() * width
            if count:
                pointers = tensor.data_ptr(), into.data_ptr()
                self._comm.allReduce(*pointers, count, code, operation, stream)
            if divisor is not None:
                into.div_(divisor)

        return self._enter("allreduce", enter, [tensor, into])

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """``ncclBroadcast`` of the bytes."""
        flat = as_bytes(tensor)

        def enter(stream: int) -> None:
            """Enter the call into a stream."""
            if flat.numel():
                pointers = flat.data_ptr(), flat.data_ptr()
                self._comm.broadcast(*pointers, flat.numel(), _BYTE, root, stream)

        return self._enter("broadcast", enter, [tensor])

    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """``ncclAllGather`` of the bytes; where parts differ in size, a group of broadcasts."""
        own, whole, size = as_bytes(tensor), as_bytes(out), tensor.element_size()

        def enter(stream: int) -> None:
            """Enter the call into a stream."""
            if len(set(counts)) == 1:
                if own.numel():
                    pointers = own.data_ptr(), whole.data_ptr()
                    self._comm.allGather(*pointers, own.numel(), _BYTE, stream)
                return
            self._nccl.groupStart()
            try:
                start = whole.data_ptr()
                for root, count in enumerate(counts):
                    given = own.data_ptr() if root == self.rank else start
                    if count:
                        self._comm.broadcast(given, start, count * size, _BYTE, root, stream)
                    start += count * size
            finally:
                self._nccl.groupEnd()

        return self._enter("allgather", enter, [tensor, out])

    def _enter(
        self, what: str, enter: Callable[[int], None], tensors: Sequence[torch.Tensor]
    ) -> Transfer:
        self.raise_if_failed()
        streams = self.streams
        streams.after(Queue.GROUP, streams.mark(Queue.WORK))
        for tensor in tensors:
            streams.hold(tensor, Queue.GROUP)
        try:
            with streams.working(Queue.GROUP):
                enter(streams.pointer(Queue.GROUP))
        except RuntimeError as problem:
            self.abort_group(f"{what} could not be started: {problem}")
            self.raise_if_failed()
        return _Entered(self, streams.mark(Queue.GROUP), tensors)

    def abort_group(self, why: str) -> None:
        """Make an end of the communicator, and with it of what is on the device."""
        if self._why is None:
            self._why = why
            self._comm.abort()

    def raise_if_failed(self) -> None:
        """Raise what has made NCCL's communicator useless.

        Raises:
            PeerError: Something has; the message says what.
        """
        if self._why is None:
            try:
                self._comm.check_async_error()
            except RuntimeError as problem:
                self.abort_group(f"NCCL reports: {problem}")
        if self._why is not None:
            raise PeerError(f"collectives cannot go on: {self._why}. End and restart the run.")
