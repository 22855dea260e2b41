"""Interfaces of device streams and events, with an implementation for the host.

A device runs the work of one stream in order and the work of two streams in any order, unless one
stream waits for an event of the other. :class:`DeviceStreams` has one stream for each
:class:`StreamRole`; :mod:`~asyncddp.device.cuda_streams` implements it with CUDA.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from typing_extensions import override

from asyncddp.tensors.allocation import empty
from asyncddp.tensors.free_list import FreeList

_this_thread = threading.local()


class StreamRole(Enum):
    """Role of a device stream: the kind of work that is enqueued on it."""

    CALLER = "caller"  # the calling thread's current stream
    COMPUTE = "compute"  # what operations compute
    DEVICE_TO_HOST = "device_to_host"  # copies
    HOST_TO_DEVICE = "host_to_device"  # copies


class DeviceEvent(Protocol):
    """Interface of an event recorded on a device stream, which can be polled for completion."""

    def done(self) -> bool:
        """Return whether all work enqueued before the event has ended; never waits."""
        ...


class InterprocessEvent(DeviceEvent, Protocol):
    """Interface of a device event that other processes of this machine can wait for."""

    handle: bytes
    """Handle with which :meth:`DeviceStreams.import_event` opens the event elsewhere."""

    def record(self, role: StreamRole) -> None:
        """Record the event on a stream; later waits are for this point."""
        ...


class DeviceStreams(ABC):
    """Base class of a device's streams: one stream per role, events, pinned and exported memory.

    Export to other processes exists for some devices only. A RuntimeError or OSError means that
    memory or an event cannot be exported or opened.
    """

    kind: ClassVar[str]  # the device type that peers are told
    device: torch.device

    def bind_thread(self) -> None:  # noqa: B027 - nothing to do on the host
        """Prepare one of the library's own threads for work on the device."""

    @abstractmethod
    def record_event(self, role: StreamRole) -> DeviceEvent:
        """Record a new event on a stream."""

    @abstractmethod
    def wait_event(self, role: StreamRole, event: DeviceEvent) -> None:
        """Make later work of a stream wait for an event; the calling thread never waits."""

    @abstractmethod
    def stream_context(self, role: StreamRole) -> AbstractContextManager[None]:
        """Make a stream current in this thread, so that torch enqueues work on it."""

    @abstractmethod
    def copy(self, out: torch.Tensor, source: torch.Tensor, role: StreamRole) -> None:
        """Enqueue a copy between pinned host memory and the device, or within the device."""

    def begin_copies(self, parts: Sequence[torch.Tensor], role: StreamRole) -> None:
        """Order later copies of a tensor's parts after the work on COMPUTE, and keep its memory."""
        if parts:
            self.wait_event(role, self.record_event(StreamRole.COMPUTE))
            self.record_stream(parts[0], role)

    def enqueue_copies(
        self, outs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], role: StreamRole
    ) -> DeviceEvent:
        """Enqueue copies between pinned memory and the device; return an event after them."""
        for out, source in zip(outs, sources, strict=True):
            if out.nbytes:
                self.copy(out, source, role)
        return self.record_event(role)

    @abstractmethod
    def record_stream(self, tensor: torch.Tensor, role: StreamRole) -> None:
        """Keep a tensor's memory from being reused before the stream's work on it is done."""

    @abstractmethod
    def stream_pointer(self, role: StreamRole) -> int:
        """Return the native handle of a stream, for other libraries."""

    @abstractmethod
    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Allocate ``size`` bytes of pinned host memory, for asynchronous copies."""

    @cached_property
    def pinned(self) -> FreeList[torch.Tensor]:
        """Free list of pinned host memory."""
        return FreeList(self.allocate_pinned)

    def allocate_exportable(self, size: int) -> torch.Tensor:
        """Allocate ``size`` bytes on the device that can be exported to other processes."""
        raise NotImplementedError

    def export_memory(self, tensor: torch.Tensor) -> bytes:
        """Export a tensor's storage: return a token that lets one other process import it.

        The token is valid as long as the tensor exists.
        """
        raise NotImplementedError

    def import_memory(self, token: bytes) -> torch.Tensor:
        """Map memory that another process has exported, without a copy."""
        raise NotImplementedError

    def create_interprocess_event(self) -> InterprocessEvent:
        """Create an event that can be exported to other processes."""
        raise NotImplementedError

    def import_event(self, handle: bytes) -> DeviceEvent:
        """Import another process's event, for :meth:`wait_event`."""
        raise NotImplementedError


def mark_library_thread() -> None:
    """Mark this thread as a library thread, to be bound to the first device that it uses."""
    _this_thread.unbound = True


def bind_library_thread(streams: DeviceStreams) -> None:
    """Bind this thread to a device on first use, if it is a library thread."""
    if getattr(_this_thread, "unbound", False):
        _this_thread.unbound = False
        streams.bind_thread()


class _ReachedEvent:
    def done(self) -> bool:
        return True


class HostStreams(DeviceStreams):
    """Implementation of device streams for the host: all calls are synchronous.

    Example:
        >>> streams, out = HostStreams(), torch.zeros(1)
        >>> streams.copy(out, torch.ones(1), StreamRole.DEVICE_TO_HOST)
        >>> float(out), streams.record_event(StreamRole.DEVICE_TO_HOST).done()
        (1.0, True)
    """

    kind = "cpu"
    device = torch.device("cpu")

    @override
    def record_event(self, role: StreamRole) -> DeviceEvent:
        return _ReachedEvent()

    @override
    def wait_event(self, role: StreamRole, event: DeviceEvent) -> None:
        pass

    @override
    def stream_context(self, role: StreamRole) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def copy(self, out: torch.Tensor, source: torch.Tensor, role: StreamRole) -> None:
        out.copy_(source)

    @override
    def record_stream(self, tensor: torch.Tensor, role: StreamRole) -> None:
        pass

    @override
    def stream_pointer(self, role: StreamRole) -> int:
        return 0

    @override
    def allocate_pinned(self, size: int) -> torch.Tensor:
        return empty((size,), torch.uint8)


class StreamOrdering:
    """Ordering of an operation's device work between the caller's earlier and later work.

    The streams of the operation wait for the caller's stream, and the caller's stream waits for the
    operation once the caller has the result; the host is not blocked.
    """

    def __init__(self, streams: DeviceStreams, tensors: tuple[torch.Tensor, ...]) -> None:
        self._streams, self.tensors = streams, tensors
        self._begun = streams.record_event(StreamRole.CALLER)
        self._ended: DeviceEvent | None = None

    def begin(self) -> None:
        """Make the operation's streams wait for the caller's earlier work; from any thread."""
        for role in (StreamRole.COMPUTE, StreamRole.DEVICE_TO_HOST, StreamRole.HOST_TO_DEVICE):
            self._streams.wait_event(role, self._begun)
        for tensor in self.tensors:
            self._streams.record_stream(tensor, StreamRole.COMPUTE)
            self._streams.record_stream(tensor, StreamRole.DEVICE_TO_HOST)

    def stream_context(self) -> AbstractContextManager[None]:
        """Make the compute stream current in this thread."""
        return self._streams.stream_context(StreamRole.COMPUTE)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the operation, or a further part of it, on the compute stream; record its end."""
        self.begin()
        try:
            with self.stream_context():
                yield
        finally:
            self.end()

    def end(self) -> None:
        """Record that the operation has enqueued all its work."""
        self._ended = self._streams.record_event(StreamRole.COMPUTE)
        self.tensors = ()

    def arrive(self, result: object) -> None:
        """Make the caller's stream wait for the operation's work, before it uses the result."""
        if self._ended is not None:
            self._streams.wait_event(StreamRole.CALLER, self._ended)
        for one in result if isinstance(result, list) else (result,):
            if isinstance(one, torch.Tensor) and one.device == self._streams.device:
                self._streams.record_stream(one, StreamRole.CALLER)


def empty_on(
    streams: DeviceStreams | None, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate an uninitialised tensor on the device of ``streams``, or on the host if None."""
    if streams is None:
        return empty(shape, dtype)
    with streams.stream_context(StreamRole.COMPUTE):
        return empty(shape, dtype, streams.device)
