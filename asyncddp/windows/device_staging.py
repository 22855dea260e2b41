"""Asynchronous copies between device tensors and the host buffers of a window.

A tensor to publish is copied on the DEVICE_TO_HOST stream, after what the caller has queued, into
pinned memory; the engine publishes it once the copy has completed. What is read is summed on the
host, copied on the HOST_TO_DEVICE stream, and averaged on the device before what the caller queues
next. The calling thread waits for neither: a verb that promises that neighbours can see something
waits for the publication, by polling an event.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from asyncddp.device.stream_registry import streams_of
from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamOrdering, StreamRole, empty_on
from asyncddp.engine import ProgressEngine
from asyncddp.errors import AsyncDDPError
from asyncddp.kernels.weighted_sum import WeightedTensor, mean_divisor, uses_lerp, weighted_sum
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import dense
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.tensors.free_list import FreeList
from asyncddp.torch_modes import normal_mode
from asyncddp.windows.buffer_pool import BufferPool
from asyncddp.windows.staging import (
    PendingPublish,
    PublishCallback,
    TensorStaging,
    UndeliveredVersion,
)

_MAX_QUEUED = 4
"""Copies of one window that may be under way each way, before a caller waits for the device."""


class DeviceResources:
    """Streams of a device, and the pinned host memory shared by all windows on it.

    Args:
        streams: Its streams.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams, self.pinned = streams, FreeList(streams.allocate_pinned)


class _ActionAfterEvent:
    """Action to run once a device event has completed, and the pinned memory that it needs."""

    def __init__(
        self,
        event: DeviceEvent | None,
        act: Callable[[], Sequence[UndeliveredVersion]],
        staging: torch.Tensor | None = None,
    ) -> None:
        self.event, self.act, self.staging = event, act, staging
        self.pending = PendingPublish()

    def ready(self) -> bool:
        """Return True if the event has completed."""
        return self.event is None or self.event.done()


class DeviceStaging(TensorStaging):
    """Asynchronous copies, through pinned host memory, for a window whose tensor is on a device.

    Args:
        pool: Buffers of the window.
        device: The device of the window's own tensor.
        engine: Publishes, on whichever thread drives it.
        lock: The window's lock.
        what: The name of the window, for messages.
    """

    def __init__(
        self,
        pool: BufferPool,
        device: DeviceResources,
        engine: ProgressEngine,
        lock: threading.RLock,
        what: str,
    ) -> None:
        super().__init__(pool)
        self._streams, self._pinned = device.streams, device.pinned
        self._engine, self._lock, self._what = engine, lock, what
        self._queued: deque[_ActionAfterEvent] = deque()
        self._copies_in: deque[tuple[DeviceEvent, torch.Tensor]] = deque()
        self._watched = self._closed = False
        self._problem: Exception | None = None

    # publishing

    def publish(
        self, tensor: torch.Tensor, factor: float, publish_buffer: PublishCallback
    ) -> PendingPublish:
        """Queue a copy into pinned memory; the engine publishes it once it has completed."""
        values = tensor = tensor.detach()
        streams = streams_of(tensor)
        staging, here = self._staging(tensor.shape, tensor.dtype)
        event: DeviceEvent | None = None
        if streams is None:
            here.copy_(tensor)
            tensor.mul_(_number(tensor, factor))
        else:
            with _ordered(streams, tensor) as order:
                if not tensor.is_contiguous() or tensor.is_neg():
                    with order.stream_context():
                        values = dense(tensor)
                    streams.wait_event(
                        StreamRole.DEVICE_TO_HOST, streams.record_event(StreamRole.COMPUTE)
                    )
                    streams.record_stream(values, StreamRole.DEVICE_TO_HOST)
                streams.copy(here, values, StreamRole.DEVICE_TO_HOST)
                event = streams.record_event(StreamRole.DEVICE_TO_HOST)
                streams.wait_event(StreamRole.COMPUTE, event)
                if factor != 1.0:
                    with order.stream_context():
                        tensor.mul_(_number(tensor, factor))
        return self._enqueue(
            _ActionAfterEvent(event, partial(self._copy_and_publish, here, publish_buffer), staging)
        )

    def run_after(self, act: Callable[[], Sequence[UndeliveredVersion]]) -> PendingPublish:
        """Run an action after all queued copies; at once if there are none."""
        return self._enqueue(_ActionAfterEvent(None, act))

    def _enqueue(self, waiting: _ActionAfterEvent) -> PendingPublish:
        self._queued.append(waiting)
        if not self._advance() and not self._watched:
            self._watched = True
            self._engine.add_progress_hook(self._try_advance)
        return waiting.pending

    def _try_advance(self) -> bool:
        """Advance the queue unless another thread has the window; return True if it is empty."""
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
        while self._queued and self._queued[0].ready():
            waiting = self._queued.popleft()
            try:
                if not self._closed:
                    waiting.pending.versions = waiting.act()
            except (AsyncDDPError, RuntimeError, OSError, MemoryError) as error:
                waiting.pending.problem = self._problem = error
            if waiting.staging is not None:
                self._pinned.give(waiting.staging, waiting.staging.nbytes)
        return not self._queued

    def _copy_and_publish(
        self, here: torch.Tensor, publish_buffer: PublishCallback
    ) -> Sequence[UndeliveredVersion]:
        """Copy a tensor into a buffer that neighbours see, and publish it."""
        buffer = self._pool.acquire_buffer()
        try:
            buffer.tensor.copy_(here)
            return publish_buffer(buffer)
        finally:
            buffer.drop()

    # reading

    def average_into(
        self,
        own: torch.Tensor,
        weight: float,
        terms: Sequence[WeightedTensor],
        shares: int,
        *,
        clone: bool,
    ) -> torch.Tensor:
        """Sum on the host in the accumulation dtype, and add that to x on the device."""
        values, traits = own.detach(), DTYPES[own.dtype]
        weights = [weight, *(share for _, share in terms)]
        divisor = mean_divisor(weights, shares) if traits.kind is not DtypeKind.INTEGER else 1
        between = uses_lerp(own.dtype, weights)
        wide = torch.int64 if traits.kind is DtypeKind.INTEGER else traits.accumulate
        with _ordered(self._streams, values) as order:
            there = None
            if terms:
                plain = divisor != 1 or between
                parts = [(tensor, 1.0 if plain else share) for tensor, share in terms]
                there = self._sum_on_device(values.shape, wide, parts)
            with order.stream_context():
                out = empty(values.shape, values.dtype, values.device) if clone else values
                if there is None:
                    torch.mul(values, _number(values, weight), out=out)
                elif between:
                    torch.lerp(values, there, weights[1], out=out)
                else:
                    there.add_(values, alpha=1 if divisor != 1 else _number(values, weight))
                    out.copy_(there.div_(divisor) if divisor != 1 else there)
        if not clone:
            return own
        self._streams.record_stream(out, StreamRole.CALLER)
        return out

    def new_sum(self, own: torch.Tensor, terms: Sequence[WeightedTensor]) -> torch.Tensor:
        """Sum on the host, and copy the result to the device."""
        with _ordered(self._streams):
            out = self._sum_on_device(own.shape, own.dtype, terms)
        self._streams.record_stream(out, StreamRole.CALLER)
        return out

    def _sum_on_device(
        self, shape: torch.Size, dtype: torch.dtype, terms: Sequence[WeightedTensor]
    ) -> torch.Tensor:
        """A sum of tensors on the host, as a new one on the device for the queue WORK."""
        streams = self._streams
        staging, here = self._staging(shape, dtype)
        weighted_sum(here, terms)
        there = empty_on(streams, tuple(shape), dtype)
        streams.wait_event(
            StreamRole.HOST_TO_DEVICE, streams.record_event(StreamRole.COMPUTE)
        )  # where its memory may be in use still
        streams.record_stream(there, StreamRole.HOST_TO_DEVICE)
        streams.copy(there, here, StreamRole.HOST_TO_DEVICE)
        arrived = streams.record_event(StreamRole.HOST_TO_DEVICE)
        streams.wait_event(StreamRole.COMPUTE, arrived)
        self._copies_in.append((arrived, staging))
        return there

    # memory

    def _staging(self, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pinned buffer, and the tensor in it."""
        self._reclaim()
        size = shape.numel() * dtype.itemsize
        staging = self._pinned.take(size)
        with normal_mode():
            return staging, staging[:size].view(dtype).view(shape)

    def _reclaim(self) -> None:
        """Take back pinned memory that the device has read."""
        while self._copies_in and self._copies_in[0][0].done():
            staging = self._copies_in.popleft()[1]
            self._pinned.give(staging, staging.nbytes)

    def throttle(self) -> None:
        """Wait while the device is more than a few copies behind; raise errors of earlier ones."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if len(self._queued) < _MAX_QUEUED and len(self._copies_in) < _MAX_QUEUED:
            return

        def has_caught_up() -> bool:
            """Return True if few enough copies are under way."""
            with self._lock:
                self._advance()
                self._reclaim()
                return len(self._queued) < _MAX_QUEUED and len(self._copies_in) < _MAX_QUEUED

        self._engine.wait_until(has_caught_up, self._what, list)

    def close(self) -> None:
        """Do not publish what is still being copied."""
        self._closed = True


@contextmanager
def _ordered(streams: DeviceStreams, *tensors: torch.Tensor) -> Iterator[StreamOrdering]:
    """Order the work inside after what the caller has queued, and before what it queues next."""
    order = StreamOrdering(streams, tensors)
    order.begin()
    try:
        yield order
    finally:
        order.end()
        order.arrive(None)


def _number(tensor: torch.Tensor, weight: float) -> float:
    return weight if tensor.is_floating_point() else int(weight)
