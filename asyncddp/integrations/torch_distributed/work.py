"""``Work`` objects and futures: handles of operations in progress, as torch.distributed expects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from asyncddp.device.stream_interfaces import StreamOrdering, mark_library_thread
from asyncddp.engine import Handle


class WorkFuture(Future[Any]):
    """Future of a ``Work``; asking for its value in Python raises the error of the operation.

    Torch's reducer crashes on a future that has an exception, so this one is completed with the
    tensors as they are, and the error is kept by the work.
    """

    work: GroupWork

    def wait(self) -> Any:
        """Wait for the work, and return its value or raise its error."""
        try:
            self.work.wait()
        finally:
            self.work.complete_future()
        return super().wait()

    def value(self) -> Any:
        """Return the value of an ended work, or raise its error."""
        self.work.raise_error()
        return super().value()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Call a function with this future once it is complete; return a future of its result."""
        self.work.settle_in_backward()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call a function with this future once it is complete."""
        self.work.settle_in_backward()
        super().add_done_callback(callback)


class GroupWork(Work):
    """torch.distributed ``Work`` of a process group's operation, run by the progress engine.

    Attributes:
        outputs: Tensors that ``result()`` returns.
        handle: The engine's handle; None for a verb that the caller's thread has run.
        source: Rank of the group that has sent a message; -1 if not known.
    """

    source = -1

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        completions: FutureThread,
        ordering: StreamOrdering | None = None,
        value: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self.outputs, self._value = outputs, value
        self._completions, self._ordering = completions, ordering
        self._lock, self._ended = threading.Lock(), False
        self._error: BaseException | None = None
        self._future: WorkFuture | None = None
        self._filled = False
        self.handle: Handle[Any] | None = None

    def end(self, error: BaseException | None) -> None:
        """Mark the work as ended, and queue its future for completion; never wait."""
        with self._lock:
            self._error = error
            self._ended = True
            future = self._future
        if future is not None:
            self._completions.add(self)

    def complete_future(self) -> None:
        """Complete the future of an ended work, which runs its callbacks; at most once."""
        with self._lock:
            if self._filled or not self._ended:
                return
            future, self._filled = self._future, self._future is not None
        if future is not None:
            ordering = self._ordering  # on whose stream the future records its events
            with nullcontext() if ordering is None else ordering.stream_context():
                future.set_result(list(self.outputs) if self._value is None else self._value())

    def raise_error(self) -> None:
        """Raise the error of the work, if it has ended with one."""
        if self._error is not None:
            raise self._error

    def settle_in_backward(self) -> None:
        """Wait inside a backward pass, where waiting for another thread's callback would hang."""
        if not self._ended and torch._C._current_graph_task_id() != -1:
            with suppress(Exception):  # kept by the work
                self.wait()
            self.complete_future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the work has ended, and raise its error.

        The thread's current stream of the device waits for what the work has queued there.

        Raises:
            WaitTimeoutError: It has not ended in ``timeout``, which is unlimited if zero; the
                verb has a deadline of its own.
        """
        if self.handle is not None:
            seconds = timeout.total_seconds()
            self.handle.wait(seconds if seconds > 0 else None)
        self.raise_error()
        return True

    def is_completed(self) -> bool:
        """Return True if the work has ended; then make the current stream wait for it."""
        if self.handle is None or not self.handle.poll():
            return self._ended
        with suppress(Exception):  # raised by wait()
            self.handle.wait()
        return True

    def is_success(self) -> bool:
        """Return True if the work has ended without an error."""
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the work; None while there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait for the work, and return the tensors that it has written."""
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Wait like :meth:`wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank of the group that has sent the message."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that the work writes; it completes without a wait."""
        with self._lock:
            if self._future is not None:
                return self._future
            devices: list[int | str | torch.device] = [
                *{one.device for one in self.outputs if one.is_cuda}
            ]
            future = WorkFuture(devices=devices) if devices else WorkFuture()
            future.work, self._future = self, future
            ended = self._ended
        if ended:
            self.complete_future()
        return future


class FutureThread:
    """Thread that completes the futures of ``Work`` objects, apart from the progress engine."""

    def __init__(self, title: str) -> None:
        self._title, self._lock = title, threading.Lock()
        self._ended: SimpleQueue[GroupWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: GroupWork) -> None:
        """Queue an ended work, to complete its future."""
        self._ended.put(work)
        with self._lock:
            if self._thread is None:
                name = f"asyncddp: futures of {self._title}"
                self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread after all futures are complete."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._ended.put(None)
            self._thread.join()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        mark_library_thread()
        while (work := self._ended.get()) is not None:
            work.complete_future()


class BatchWork(Work):
    """torch.distributed ``Work`` of a coalesced batch of operations, done once all of them are."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all works, and raise the first error."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Return True if all works have ended."""
        return all([work.is_completed() for work in self._works])

    def get_future(self) -> Future[Any]:
        """Return a future of all works' values."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures)
