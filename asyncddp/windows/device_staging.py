"""Asynchronous copies between device tensors and the host buffers of a window.

A tensor to publish is copied into pinned memory on the DEVICE_TO_HOST stream, after the caller's
earlier work; the engine publishes it once the copy has completed. Tensors that were read are summed
on the host; the sum is copied on the HOST_TO_DEVICE stream, and averaged on the device before the
caller's later work. The calling thread waits for neither copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import (
    DeviceEvent,
    DeviceStreams,
    StreamOrdering,
    StreamRole,
    empty_on,
)
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ProgressEngine
from asyncddp.errors import AsyncDDPError
from asyncddp.kernels.cpu_weighted_sum import WeightedTensor, mean_divisor, uses_lerp, weighted_sum
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import dense
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.tensors.means import split_divisor
from asyncddp.torch_modes import normal_mode
from asyncddp.windows.staging import (
    BufferPool,
    PendingPublish,
    PublishCallback,
    SentMessages,
    SynchronousTensorStaging,
    scalar_for,
)

_MAX_QUEUED = 4  # copies of a window under way each way, before a caller waits for the device


class _ActionAfterEvent(NamedTuple):
    """Action to run after a device event, and the pinned memory that it needs."""

    pending: PendingPublish
    act: Callable[[], SentMessages]
    event: DeviceEvent | None = None
    pinned: torch.Tensor | None = None  # memory that it needs until then


class DeviceStaging(SynchronousTensorStaging):
    """Staging for a window whose tensor is on a device: asynchronous copies via pinned memory.

    The engine publishes, in whichever thread drives it, under the window's lock.
    """

    def __init__(
        self,
        pool: BufferPool,
        streams: DeviceStreams,
        engine: ProgressEngine,
        lock: threading.RLock,
        what: str,
    ) -> None:
        super().__init__(pool)
        self._streams = streams
        self._engine, self._lock, self._what = engine, lock, what
        self._queued: deque[_ActionAfterEvent] = deque()
        self._copies_in: deque[tuple[DeviceEvent, torch.Tensor]] = deque()
        self._watched = self._closed = False
        self._problem: Exception | None = None

    # publishing

    @override
    def publish(
        self, tensor: torch.Tensor, factor: float, publish_buffer: PublishCallback
    ) -> PendingPublish:
        values = tensor = tensor.detach()
        streams = streams_of(tensor)
        pinned, here = self._pinned_tensor(tensor.shape, tensor.dtype)
        event: DeviceEvent | None = None
        if streams is None:
            here.copy_(tensor)
            tensor.mul_(scalar_for(tensor, factor))
        else:
            with _ordered(streams, tensor) as order:
                if not tensor.is_contiguous() or tensor.is_neg():
                    with order.stream_context():
                        values = dense(tensor)
                    streams.begin_copies([values], StreamRole.DEVICE_TO_HOST)
                event = streams.enqueue_copies([here], [values], StreamRole.DEVICE_TO_HOST)
                streams.wait_event(StreamRole.COMPUTE, event)
                if factor != 1.0:
                    with order.stream_context():
                        tensor.mul_(scalar_for(tensor, factor))
        return self._enqueue(partial(self._publish_copy, here, publish_buffer), event, pinned)

    @override
    def run_after(self, act: Callable[[], SentMessages]) -> PendingPublish:
        return self._enqueue(act)

    def _enqueue(
        self,
        act: Callable[[], SentMessages],
        event: DeviceEvent | None = None,
        pinned: torch.Tensor | None = None,
    ) -> PendingPublish:
        """Run an action after all queued actions and an event; immediately if there are none."""
        pending = PendingPublish()
        self._queued.append(_ActionAfterEvent(pending, act, event, pinned))
        if not self._advance() and not self._watched:
            self._watched = True
            self._engine.add_progress_hook(self._try_advance)
        return pending

    def _try_advance(self) -> bool:
        """Run ready actions unless another thread holds the window; True if none is left."""
        if not self._lock.acquire(blocking=False):  # its owner may be waiting for the engine
            return False
        try:
            over = self._advance()
            self._watched = not over
            return over
        finally:
            self._lock.release()

    def _advance(self) -> bool:
        """Run the actions whose events have completed, in order; return True if none is left."""
        while self._queued and ((event := self._queued[0].event) is None or event.done()):
            pending, act, _, pinned = self._queued.popleft()
            try:
                if not self._closed:
                    pending.messages = act()
            except (AsyncDDPError, RuntimeError, OSError, MemoryError) as error:
                pending.problem = self._problem = error
            if pinned is not None:
                self._streams.pinned.give(pinned, pinned.nbytes)
        return not self._queued

    # reading

    @override
    def average_into(
        self,
        own: torch.Tensor,
        weight: float,
        terms: Sequence[WeightedTensor],
        shares: int,
        *,
        clone: bool,
    ) -> torch.Tensor:
        # sum on the host in the accumulation dtype, and add that to x on the device
        values, traits = own.detach(), DTYPES[own.dtype]
        weights = [weight, *(share for _, share in terms)]
        mean = mean_divisor(weights, shares) if traits.kind is not DtypeKind.INTEGER else 1
        scale, divisor = split_divisor(mean)
        between = uses_lerp(own.dtype, weights)
        wide = torch.int64 if traits.kind is DtypeKind.INTEGER else traits.accumulate
        with _ordered(self._streams, values) as order:
            there = None
            if terms:
                plain = 1.0 if between else scale
                parts = [(x, plain if between or mean != 1 else share) for x, share in terms]
                there = self._sum_on_device(values.shape, wide, parts)
            with order.stream_context():
                out = empty(values.shape, values.dtype, values.device) if clone else values
                if there is None:
                    torch.mul(values, scalar_for(values, weight), out=out)
                elif between:
                    torch.lerp(values, there, weights[1], out=out)
                else:
                    there.add_(values, alpha=scale if mean != 1 else scalar_for(values, weight))
                    out.copy_(there.div_(divisor) if divisor != 1 else there)
        if not clone:
            return own
        self._streams.record_stream(out, StreamRole.CALLER)
        return out

    @override
    def new_sum(self, own: torch.Tensor, terms: Sequence[WeightedTensor]) -> torch.Tensor:
        with _ordered(self._streams):
            out = self._sum_on_device(own.shape, own.dtype, terms)
        self._streams.record_stream(out, StreamRole.CALLER)
        return out

    def _sum_on_device(
        self, shape: torch.Size, dtype: torch.dtype, terms: Sequence[WeightedTensor]
    ) -> torch.Tensor:
        """Sum tensors on the host, and copy the sum to a new device tensor for COMPUTE work."""
        streams = self._streams
        pinned, here = self._pinned_tensor(shape, dtype)
        weighted_sum(here, terms)
        there = empty_on(streams, tuple(shape), dtype)
        streams.begin_copies([there], StreamRole.HOST_TO_DEVICE)  # its memory is in use until then
        arrived = streams.enqueue_copies([there], [here], StreamRole.HOST_TO_DEVICE)
        streams.wait_event(StreamRole.COMPUTE, arrived)
        self._copies_in.append((arrived, pinned))
        return there

    # memory

    def _pinned_tensor(
        self, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._reclaim()
        size = shape.numel() * dtype.itemsize
        pinned = self._streams.pinned.take(size)
        with normal_mode():
            return pinned, pinned[:size].view(dtype).view(shape)

    def _reclaim(self) -> None:
        """Free pinned memory whose copies to the device have completed."""
        while self._copies_in and self._copies_in[0][0].done():
            staging = self._copies_in.popleft()[1]
            self._streams.pinned.give(staging, staging.nbytes)

    @override
    def throttle(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if self._few_under_way():
            return

        def has_caught_up() -> bool:
            with self._lock:
                self._advance()
                self._reclaim()
                return self._few_under_way()

        self._engine.wait_until(has_caught_up, self._what, list)

    def _few_under_way(self) -> bool:
        return len(self._queued) < _MAX_QUEUED and len(self._copies_in) < _MAX_QUEUED

    @override
    def close(self) -> None:
        self._closed = True


@contextmanager
def _ordered(streams: DeviceStreams, *tensors: torch.Tensor) -> Iterator[StreamOrdering]:
    """Order device work in this context between the caller's earlier and later device work."""
    order = StreamOrdering(streams, tensors)
    order.begin()
    try:
        yield order
    finally:
        order.end()
        order.arrive(None)
