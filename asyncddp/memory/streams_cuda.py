"""The streams of one CUDA device. Not run on a GPU yet: see ``docs/gpu.md``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from asyncddp.memory.allocate import empty
from asyncddp.memory.modes import normal_mode
from asyncddp.memory.packing import pack, unpack
from asyncddp.memory.streams import DeviceStreams, Event, InterprocessEvent, Queue

__all__ = ["CudaStreams"]


class _Shared(NamedTuple):
    """A storage as torch shows it to other processes."""

    handle: bytes
    nbytes: int
    offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class _CudaEvent:
    """An event that CUDA has recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event
        self.done: Callable[[], bool] = event.query


class _CudaInterprocessEvent(_CudaEvent):
    """An event with a handle of CUDA's."""

    def __init__(
        self,
        event: torch.cuda.Event,
        handle: bytes,
        stream_of: Callable[[Queue], torch.cuda.Stream],
    ) -> None:
        super().__init__(event)
        self.handle, self._stream_of = handle, stream_of

    def record(self, queue: Queue) -> None:
        """Record it."""
        self.event.record(self._stream_of(queue))


class _Bytes:
    """Memory of a device as other libraries see it, which keeps nothing alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


class CudaStreams(DeviceStreams):
    """Side streams of a CUDA device, beside whatever stream the caller uses.

    Nothing here waits for the device: events are asked, streams wait for each other.

    Args:
        device: A CUDA device.

    References:
        PyTorch documentation, "CUDA semantics" (streams, pinned memory) and
        ``torch.Tensor.record_stream``. CUDA samples, ``simpleIPC``: handles of memory and of events
        of several GPUs, each opened on the GPU of the process that waits and reads.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = {
            queue: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for queue in Queue
            if queue is not Queue.CALLER
        }

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        if queue is Queue.CALLER:
            return torch.cuda.current_stream(self.device)
        return self._side[queue]

    def mark(self, queue: Queue) -> Event:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream(queue))
        return _CudaEvent(event)

    def after(self, queue: Queue, event: Event) -> None:
        """Have the stream wait for the event."""
        if isinstance(event, _CudaEvent):
            self._stream(queue).wait_event(event.event)

    def working(self, queue: Queue) -> AbstractContextManager[None]:
        """Make the stream this thread's current one, and its device as well."""
        return torch.cuda.stream(self._stream(queue))

    def copy(self, out: torch.Tensor, source: torch.Tensor, queue: Queue) -> None:
        """Queue a copy that does not block."""
        with torch.cuda.stream(self._stream(queue)):
            out.copy_(source, non_blocking=True)

    def hold(self, tensor: torch.Tensor, queue: Queue) -> None:
        """Tell torch's allocator that the stream uses the tensor."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream(queue))

    def pointer(self, queue: Queue) -> int:
        """The address of the ``cudaStream_t``."""
        return int(self._stream(queue).cuda_stream)

    def pinned(self, size: int) -> torch.Tensor:
        """Page-locked memory, from torch's allocator, for this device and no other."""
        with torch.cuda.device(self.device), normal_mode():
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def lendable(self, size: int) -> torch.Tensor:
        """Memory of the device."""
        with self.working(Queue.WORK):
            return empty((size,), torch.uint8, self.device)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The storage's bytes as a tensor of their own, by the CUDA array interface.

        What is shown gets another deleter, and from then on ``record_stream`` passes over it in
        silence: so it is the alias that is shown, never what a user holds.
        """
        storage = tensor.untyped_storage()
        with normal_mode():
            raw = _Bytes(storage.data_ptr(), storage.nbytes())
            return torch.as_tensor(raw, device=self.device)

    def lend(self, tensor: torch.Tensor) -> bytes:
        """A handle of CUDA's for memory between processes, as torch gives it to its workers.

        torch counts one receiver for each token.
        """
        with self.working(Queue.IN):  # which is idle: the token's own event holds nobody up
            shared = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return pack(shared[1:])

    def borrow(self, token: bytes) -> torch.Tensor:
        """Open the handle on this device, which may be another one than that of the memory.

        torch waits for its current stream when the tensor is dropped: drop it while IN works.
        ``torch.multiprocessing`` would look for the place in a cache of its own, and might find
        what lay there before, of another size.
        """
        with self.working(Queue.IN), normal_mode():
            shared = unpack(token, _Shared, "a handle of CUDA memory")
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *shared)
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def interprocess_event(self) -> InterprocessEvent:
        """An event without times, with its handle."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            handle = event.ipc_handle()  # type: ignore[no-untyped-call]
        return _CudaInterprocessEvent(event, handle, self._stream)

    def imported_event(self, handle: bytes) -> Event:
        """Open the handle on this device."""
        event = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
            self.device, handle
        )
        return _CudaEvent(event)
