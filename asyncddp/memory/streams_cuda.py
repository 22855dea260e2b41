"""The streams of one CUDA device. Not run on a GPU yet: see ``docs/gpu.md``."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import reduce_tensor

from asyncddp.memory.streams import DeviceStreams, Event, Queue

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CudaStreams"]


class _CudaEvent:
    """An event that CUDA has recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event
        self.done: Callable[[], bool] = event.query


class CudaStreams(DeviceStreams):
    """Side streams of a CUDA device, beside whatever stream the caller uses.

    Nothing here waits for the device: events are asked, streams wait for each other.

    Args:
        device: A CUDA device.

    References:
        PyTorch documentation, "CUDA semantics" (streams, pinned memory) and
        ``torch.Tensor.record_stream``.
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
        """Page-locked memory, from torch's allocator."""
        with torch.cuda.device(
            self.device
        ):  # else the thread's device, often the first, takes part
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def lendable(self, size: int) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def lend(self, tensor: torch.Tensor) -> bytes:
        """A handle of CUDA's for memory between processes, as torch passes it to its workers."""
        return pickle.dumps(reduce_tensor(tensor))  # type: ignore[no-untyped-call]

    def borrow(self, token: bytes) -> torch.Tensor:
        """Open the handle, on the device of the same number."""
        rebuild, arguments = pickle.loads(token)
        found: torch.Tensor = rebuild(*arguments)
        return found
