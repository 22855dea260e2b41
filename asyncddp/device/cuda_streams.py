"""CUDA implementation of device streams and events."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from asyncddp.device.stream_interfaces import (
    DeviceEvent,
    DeviceStreams,
    InterprocessEvent,
    StreamRole,
    bind_library_thread,
)
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import empty
from asyncddp.torch_modes import normal_mode

logger = logging.getLogger("asyncddp")


class _StorageIPCHandle(NamedTuple):
    """CUDA IPC handles of a tensor's storage as torch exports them: for its memory and an event."""

    handle: bytes
    nbytes: int
    offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class _CudaEvent:
    def __init__(self, streams: CudaStreams, event: torch.cuda.Event) -> None:
        self._streams, self.event = streams, event

    def done(self) -> bool:
        bind_library_thread(self._streams)
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class _CudaInterprocessEvent(_CudaEvent):
    """CUDA event that other processes can open with its CUDA IPC handle."""

    def __init__(self, streams: CudaStreams) -> None:
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        super().__init__(streams, event)
        self.handle: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]

    def record(self, role: StreamRole) -> None:
        self.event.record(self._streams.stream(role))


class CudaArrayView:
    """View of device memory that implements the CUDA array interface, for MPI for Python.

    In version 2 of the interface, the consumer waits for no stream. The view keeps its owner alive.

    References:
        "CUDA Array Interface (Version 3)", Numba's documentation; "Support for GPU-aware MPI", the
        documentation of MPI for Python.
    """

    def __init__(self, address: int, size: int, owner: torch.Tensor | None = None) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


@contextmanager
def use_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream and its device current in this thread.

    Leaving ``torch.cuda.stream`` alone would make a context on the device that was current before;
    leaving ``torch.cuda.device`` does not.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def private_stream(device: torch.device) -> torch.cuda.Stream:
    """Create a stream that is not from torch's pool, so that user code cannot share it.

    torch hands out the 32 streams of its pool in turn, to all callers. This stream is made by the
    CUDA driver, does not wait for the default stream, and lives as long as the process. If the
    driver fails, it is a stream of torch's pool.
    """
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        pooled = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        pooled.query()  # the runtime makes the device's context this thread's current one
        try:
            problem = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(pointer), 1)
        except (OSError, AttributeError) as error:
            problem = error
    if problem:
        logger.debug("streams of %s are of torch's pool: %s", device, problem)
        return pooled
    return torch.cuda.ExternalStream(pointer.value, device)  # type: ignore[no-untyped-call]


class CudaStreams(DeviceStreams):
    """Streams of a CUDA device: the caller's current stream, and side streams of asyncddp.

    The host never waits for the device: events are queried, streams wait for each other.

    References:
        PyTorch documentation, "CUDA semantics" (streams, pinned memory) and
        ``torch.Tensor.record_stream``. CUDA samples, ``simpleIPC``.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        side = [role for role in StreamRole if role is not StreamRole.CALLER]
        self._side = {role: private_stream(device) for role in side}

    def bind_thread(self) -> None:
        """Make the device current in this thread, whose calls then invalidate no stream capture.

        A new thread is on device 0, and its event queries invalidate captures in torch's default
        mode ("cuThreadExchangeStreamCaptureMode", CUDA Driver API, which torch does not offer).
        """
        torch.cuda.set_device(self.device)
        try:
            driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(2)  # relaxed
            problem = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        except (OSError, AttributeError) as error:
            problem = error
        if problem:
            logger.debug("captures of CUDA graphs must be thread-local: %s", problem)

    def stream(self, role: StreamRole) -> torch.cuda.Stream:
        """Return the torch stream that has a role."""
        bind_library_thread(self)
        if role is StreamRole.CALLER:
            return torch.cuda.current_stream(self.device)
        return self._side[role]

    def record_event(self, role: StreamRole) -> DeviceEvent:
        """Record a new event on a stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream(role))
        return _CudaEvent(self, event)

    def wait_event(self, role: StreamRole, event: DeviceEvent) -> None:
        """Make later work of a stream wait for an event."""
        if isinstance(event, _CudaEvent):
            self.stream(role).wait_event(event.event)

    def stream_context(self, role: StreamRole) -> AbstractContextManager[None]:
        """Make a stream and its device current in this thread."""
        return use_stream(self.stream(role))

    def copy(self, out: torch.Tensor, source: torch.Tensor, role: StreamRole) -> None:
        """Enqueue an asynchronous copy on a stream."""
        with self.stream_context(role):
            out.copy_(source, non_blocking=True)

    def record_stream(self, tensor: torch.Tensor, role: StreamRole) -> None:
        """Keep torch's allocator from reusing a tensor's memory before the stream's work ends."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream(role))

    def stream_pointer(self, role: StreamRole) -> int:
        """Return the address of the ``cudaStream_t``."""
        return int(self.stream(role).cuda_stream)

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Allocate pinned host memory from torch's allocator."""
        with torch.cuda.device(self.device), normal_mode():
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate_exportable(self, size: int) -> torch.Tensor:
        """Allocate device memory, on the compute stream."""
        with self.stream_context(StreamRole.COMPUTE):
            return empty((size,), torch.uint8, self.device)

    def export_memory(self, tensor: torch.Tensor) -> bytes:
        """Export a CUDA IPC memory handle, as ``torch.multiprocessing`` does.

        torch counts one receiver per token, and records an event, here on an idle stream.
        """
        with self.stream_context(StreamRole.HOST_TO_DEVICE):
            shared = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return pack(shared[1:])

    def import_memory(self, token: bytes) -> torch.Tensor:
        """Open a CUDA IPC memory handle on this device, which may differ from the memory's.

        torch waits for its current stream when the tensor is dropped: drop it in the context of the
        host-to-device stream. ``torch.multiprocessing`` would look for the handle in its own cache,
        and might find earlier memory there, of another size.
        """
        with self.stream_context(StreamRole.HOST_TO_DEVICE), normal_mode():
            shared = unpack(token, _StorageIPCHandle, "a handle of CUDA memory")
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *shared)
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def create_interprocess_event(self) -> InterprocessEvent:
        """Create an exportable event without timing, with its handle."""
        with torch.cuda.device(self.device):
            return _CudaInterprocessEvent(self)

    def import_event(self, handle: bytes) -> DeviceEvent:
        """Open the event handle of another process on this device."""
        imported = torch.cuda.Event.from_ipc_handle
        return _CudaEvent(self, imported(self.device, handle))  # type: ignore[no-untyped-call]
