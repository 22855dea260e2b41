"""Tensors on a device, of a window that lies in the memory of the host.

What is published is copied out on the queue OUT, after what the caller has queued, into pinned
memory; the engine publishes it once it is there. What is read is summed on the host, copied in on
the queue IN, and mixed on the device, before what the caller queues next. The calling thread waits
for neither: where a verb says that neighbours can see something, it waits for the publication, by
asking an event.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from asyncddp.engine import Engine
from asyncddp.errors import AsyncDDPError
from asyncddp.memory.allocate import empty
from asyncddp.memory.dtypes import DTYPES, Kind
from asyncddp.memory.modes import normal_mode
from asyncddp.memory.pinned import PinnedPool
from asyncddp.memory.streams import DeviceStreams, Event, Order, Queue, empty_on, streams_of
from asyncddp.memory.views import dense
from asyncddp.windows.pool import Pool
from asyncddp.windows.side import Publication, Show, Side, Version
from asyncddp.windows.sums import Term, lerps, mean_of, weighted

__all__ = ["Device", "DeviceSide"]

_AHEAD = 4
"""Copies of one window that may be under way each way, before a caller waits for the device."""


class Device:
    """A device, and pinned memory of the host for all windows whose tensors lie on it.

    Args:
        streams: Its streams.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams, self.pinned = streams, PinnedPool(streams)


class _Waiting:
    """What is to be done once an event has come, and the pinned memory that it needs till then."""

    def __init__(
        self,
        event: Event | None,
        act: Callable[[], Sequence[Version]],
        staging: torch.Tensor | None = None,
    ) -> None:
        self.event, self.act, self.staging = event, act, staging
        self.publication = Publication()

    def ready(self) -> bool:
        """Whether the event has come."""
        return self.event is None or self.event.done()


class DeviceSide(Side):
    """On a device.

    Args:
        pool: Buffers of the window.
        device: Where the window's own tensor lies.
        engine: Publishes, on whichever thread drives it.
        lock: The window's.
        what: The window, for messages.
    """

    def __init__(
        self,
        pool: Pool,
        device: Device,
        engine: Engine,
        lock: threading.RLock,
        what: str,
    ) -> None:
        super().__init__(pool)
        self._streams, self._pinned = device.streams, device.pinned
        self._engine, self._lock, self._what = engine, lock, what
        self._leaving: deque[_Waiting] = deque()
        self._coming: deque[tuple[Event, torch.Tensor]] = deque()
        self._watched = self._closed = False
        self._problem: Exception | None = None

    # what goes

    def publish(self, tensor: torch.Tensor, factor: float, show: Show) -> Publication:
        """Queue a copy into pinned memory, and have the engine publish it once it is there."""
        values = tensor = tensor.detach()
        streams = streams_of(tensor)
        staging, here = self._staging(tensor.shape, tensor.dtype)
        event: Event | None = None
        if streams is None:
            here.copy_(tensor)
            tensor.mul_(_number(tensor, factor))
        else:
            with _ordered(streams, tensor) as order:
                if not tensor.is_contiguous() or tensor.is_neg():
                    with order.working():
                        values = dense(tensor)
                    streams.after(Queue.OUT, streams.mark(Queue.WORK))
                    streams.hold(values, Queue.OUT)
                streams.copy(here, values, Queue.OUT)
                event = streams.mark(Queue.OUT)
                streams.after(Queue.WORK, event)
                if factor != 1.0:
                    with order.working():
                        tensor.mul_(_number(tensor, factor))
        return self._later(_Waiting(event, partial(self._shown, here, show), staging))

    def then(self, act: Callable[[], Sequence[Version]]) -> Publication:
        """At once where nothing is under way."""
        return self._later(_Waiting(None, act))

    def _later(self, waiting: _Waiting) -> Publication:
        self._leaving.append(waiting)
        if not self._advance() and not self._watched:
            self._watched = True
            self._engine.errand(self._attempt)
        return waiting.publication

    def _attempt(self) -> bool:
        """Go on, unless somebody has the window just now; whether nothing is left to be done."""
        if not self._lock.acquire(blocking=False):  # its owner may be waiting for the engine
            return False
        try:
            over = self._advance()
            self._watched = not over
            return over
        finally:
            self._lock.release()

    def _advance(self) -> bool:
        """Do what can be done, in order; whether nothing is left."""
        while self._leaving and self._leaving[0].ready():
            waiting = self._leaving.popleft()
            try:
                if not self._closed:
                    waiting.publication.versions = waiting.act()
            except (AsyncDDPError, RuntimeError, OSError, MemoryError) as error:
                waiting.publication.problem = self._problem = error
            if waiting.staging is not None:
                self._pinned.give(waiting.staging)
        return not self._leaving

    def _shown(self, here: torch.Tensor, show: Show) -> Sequence[Version]:
        """Copy it where neighbours see it, and publish."""
        buffer = self._pool.room()
        try:
            buffer.tensor.copy_(here)
            return show(buffer)
        finally:
            buffer.drop()

    # what comes

    def mix(
        self,
        own: torch.Tensor,
        weight: float,
        terms: Sequence[Term],
        shares: int,
        *,
        clone: bool,
    ) -> torch.Tensor:
        """Sum on the host, in a dtype that holds the sum, and add that to x on the device."""
        values, row = own.detach(), DTYPES[own.dtype]
        weights = [weight, *(share for _, share in terms)]
        divisor = mean_of(weights, shares) if row.kind is not Kind.INTEGER else 1
        between = lerps(own.dtype, weights)
        wide = torch.int64 if row.kind is Kind.INTEGER else row.accumulate
        with _ordered(self._streams, values) as order:
            there = None
            if terms:
                plain = divisor != 1 or between
                parts = [(tensor, 1.0 if plain else share) for tensor, share in terms]
                there = self._brought(values.shape, wide, parts)
            with order.working():
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
        self._streams.hold(out, Queue.CALLER)
        return out

    def bring(self, own: torch.Tensor, terms: Sequence[Term]) -> torch.Tensor:
        """Sum on the host, and copy that in."""
        with _ordered(self._streams):
            out = self._brought(own.shape, own.dtype, terms)
        self._streams.hold(out, Queue.CALLER)
        return out

    def _brought(
        self, shape: torch.Size, dtype: torch.dtype, terms: Sequence[Term]
    ) -> torch.Tensor:
        """A sum of tensors on the host, as a new one on the device for the queue WORK."""
        streams = self._streams
        staging, here = self._staging(shape, dtype)
        weighted(here, terms)
        there = empty_on(streams, tuple(shape), dtype)
        streams.after(Queue.IN, streams.mark(Queue.WORK))  # where its memory may be in use still
        streams.hold(there, Queue.IN)
        streams.copy(there, here, Queue.IN)
        arrived = streams.mark(Queue.IN)
        streams.after(Queue.WORK, arrived)
        self._coming.append((arrived, staging))
        return there

    # memory

    def _staging(self, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A pinned buffer, and the tensor in it."""
        self._reclaim()
        size = shape.numel() * dtype.itemsize
        staging = self._pinned.take(size)
        with normal_mode():
            return staging, staging[:size].view(dtype).view(shape)

    def _reclaim(self) -> None:
        """Take back what the device has read."""
        while self._coming and self._coming[0][0].done():
            self._pinned.give(self._coming.popleft()[1])

    def keep_up(self) -> None:
        """Wait while the device is more than a few copies behind; raise what went wrong."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if len(self._leaving) < _AHEAD and len(self._coming) < _AHEAD:
            return

        def near() -> bool:
            """Whether it has come nearer."""
            with self._lock:
                self._advance()
                self._reclaim()
                return len(self._leaving) < _AHEAD and len(self._coming) < _AHEAD

        self._engine.attend(near, self._what, list)

    def close(self) -> None:
        """What is being copied out still is not published."""
        self._closed = True


@contextmanager
def _ordered(streams: DeviceStreams, *tensors: torch.Tensor) -> Iterator[Order]:
    """What is done inside comes after what the caller has queued, and before what it will."""
    order = Order(streams, tensors)
    order.begin()
    try:
        yield order
    finally:
        order.end()
        order.arrive(None)


def _number(tensor: torch.Tensor, weight: float) -> float:
    return weight if tensor.is_floating_point() else int(weight)
