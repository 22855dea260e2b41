"""Streams of a device: which of its work waits for which, behind one interface.

A device does what is queued on one of its streams in order, and what is queued on two of them in
any order, unless one waits for an event of the other. :class:`DeviceStreams` names the queues
that a verb needs; :mod:`~asyncddp.memory.streams_cuda` has them of CUDA, and
:mod:`~asyncddp.memory.streams_host` a stand-in, with which all of this runs without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import ClassVar, Protocol

import torch

from asyncddp.memory.allocate import empty

__all__ = [
    "DeviceStreams",
    "Event",
    "InterprocessEvent",
    "Order",
    "Queue",
    "empty_on",
    "order_of",
    "stand_in",
    "streams_of",
    "streams_of_device",
]


class Queue(Enum):
    """Who queues work on a device."""

    CALLER = "caller"
    """The thread that calls: whatever stream is current there."""
    WORK = "work"
    """The arithmetic of verbs."""
    OUT = "out"
    """Copies from the device to the host."""
    IN = "in"
    """Copies from the host to the device."""
    GROUP = "group"
    """What all ranks do together on their devices, which waits for the last of them."""


class Event(Protocol):
    """A place in a queue."""

    def done(self) -> bool:
        """Whether all that was queued before it has ended; never waits."""
        ...


class InterprocessEvent(Event, Protocol):
    """An event for which other processes of this machine can wait, recorded again and again."""

    @property
    def handle(self) -> bytes:
        """What :meth:`DeviceStreams.imported_event` takes in another process."""
        ...

    def record(self, queue: Queue) -> None:
        """Put it at the end of a queue; whoever begins to wait for it now waits for that place."""
        ...


class DeviceStreams(ABC):
    """The queues of one device.

    Attributes:
        kind: What the peers are told that a tensor lies on: ``"cuda"``.
        device: The device.
    """

    kind: ClassVar[str]
    device: torch.device

    @abstractmethod
    def mark(self, queue: Queue) -> Event:
        """Put an event at the end of a queue."""

    @abstractmethod
    def after(self, queue: Queue, event: Event) -> None:
        """Let whatever is queued from now on wait for an event; the calling thread never waits."""

    @abstractmethod
    def working(self, queue: Queue) -> AbstractContextManager[None]:
        """While entered, what this thread has torch do is queued there."""

    @abstractmethod
    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Queue) -> None:
        """Queue a copy between pinned host memory and the device, or on the device."""

    @abstractmethod
    def hold(self, tensor: torch.Tensor, queue: Queue) -> None:
        """Keep a tensor's memory from being used again before the queue is through with it."""

    @abstractmethod
    def pointer(self, queue: Queue) -> int:
        """The queue, as other libraries are told of it."""

    @abstractmethod
    def pinned(self, size: int) -> torch.Tensor:
        """Make ``size`` bytes of host memory that the device copies from and to by itself."""

    @abstractmethod
    def lendable(self, size: int) -> torch.Tensor:
        """Make ``size`` bytes on the device that other processes can be shown."""

    @abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """All bytes of a tensor's storage, as a tensor that does not keep them."""

    @abstractmethod
    def lend(self, tensor: torch.Tensor) -> bytes:
        """Say where all bytes of a tensor's storage are, for one process on this machine.

        The token is good for as long as the tensor is kept.

        Raises:
            RuntimeError: Its memory cannot be shown.
        """

    @abstractmethod
    def borrow(self, token: bytes) -> torch.Tensor:
        """The bytes of another process, where they lie.

        Raises:
            RuntimeError: They cannot be seen from here.
            OSError: The same, as the system says it.
        """

    @abstractmethod
    def interprocess_event(self) -> InterprocessEvent:
        """Make an event that other processes can be shown."""

    @abstractmethod
    def imported_event(self, handle: bytes) -> Event:
        """Another process's event, for which :meth:`after` lets a queue wait.

        Raises:
            RuntimeError: It cannot be seen from here.
            OSError: The same, as the system says it.
        """


class Order:
    """How one verb keeps to the order of its caller, without anybody waiting for the device.

    What the caller has queued before the verb comes before all that the verb queues, and whatever
    the caller queues once it has the result comes after it.

    Args:
        streams: Of the device.
        tensors: What the verb reads and writes.
    """

    def __init__(self, streams: DeviceStreams, tensors: tuple[torch.Tensor, ...]) -> None:
        self._streams, self._tensors = streams, tensors
        self._begun = streams.mark(Queue.CALLER)
        self._ended: Event | None = None

    def begin(self) -> None:
        """The verb begins, on whatever thread."""
        for queue in (Queue.WORK, Queue.OUT, Queue.IN):
            self._streams.after(queue, self._begun)
        for tensor in self._tensors:
            self._streams.hold(tensor, Queue.WORK)
            self._streams.hold(tensor, Queue.OUT)

    def working(self) -> AbstractContextManager[None]:
        """While entered, what this thread has torch do is the verb's work."""
        return self._streams.working(Queue.WORK)

    def end(self) -> None:
        """The verb has queued all its work."""
        self._ended = self._streams.mark(Queue.WORK)
        self._tensors = ()

    def arrive(self, result: object) -> None:
        """The calling thread has got the result, and goes on after the verb's work."""
        if self._ended is not None:
            self._streams.after(Queue.CALLER, self._ended)
        if isinstance(result, torch.Tensor):
            self._streams.hold(result, Queue.CALLER)


class _Known:
    """The streams of this process, by device; and what stands in for a device on the host."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, DeviceStreams] = {}
        self.stand_in: DeviceStreams | None = None


_known = _Known()


def streams_of(tensor: torch.Tensor) -> DeviceStreams | None:
    """The streams of a tensor's device; None where it lies on the host, or on what has none.

    Example:
        >>> streams_of(torch.zeros(1)) is None
        True
    """
    if tensor.is_cpu:
        return _known.stand_in
    return streams_of_device(tensor.device) if tensor.is_cuda else None


def streams_of_device(device: torch.device) -> DeviceStreams:
    """The streams of a CUDA device, made when first asked for."""
    found = _known.by_device.get(device)
    if found is None:
        from asyncddp.memory.streams_cuda import CudaStreams

        found = _known.by_device.setdefault(device, CudaStreams(device))
    return found


def empty_on(
    streams: DeviceStreams | None, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Make a contiguous tensor on a device, or on the host, with whatever values it holds.

    Args:
        streams: Of the device; None for the host.
        shape: Its shape.
        dtype: Its dtype.
    """
    if streams is None:
        return empty(shape, dtype)
    with streams.working(Queue.WORK):
        return empty(shape, dtype, streams.device)


def order_of(tensor: torch.Tensor, *others: torch.Tensor | None) -> Order | None:
    """The order that a verb keeps to, from the caller's current stream; None on the host.

    Args:
        tensor: What the verb reads.
        *others: What else it reads or writes.
    """
    streams = streams_of(tensor)
    if streams is None:
        return None
    kept = [other for other in others if other is not None and other.device == tensor.device]
    return Order(streams, (tensor, *kept))


@contextmanager
def stand_in(streams: DeviceStreams) -> Iterator[None]:
    """While entered, tensors on the host count as lying on a device, in all threads.

    For tests: everything that serves a GPU then runs in full, on tensors of the host.
    """
    before, _known.stand_in = _known.stand_in, streams
    try:
        yield
    finally:
        _known.stand_in = before
