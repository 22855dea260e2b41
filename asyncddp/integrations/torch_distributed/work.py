"""Works and futures: handles of verbs that are under way, as torch's C++ and Python expect them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from asyncddp.device.stream_interfaces import StreamOrdering
from asyncddp.errors import WaitTimeoutError
from asyncddp.torch_modes import inference_mode


class WorkFuture(Future[Any]):
    """Future of a work, which raises the work's error where Python asks for its value.

    Torch's reducer crashes on a future that has an exception, so this one is completed with the
    tensors as they are, and the error is kept by the work.
    """

    work: GroupWork

    def wait(self) -> Any:
        """Wait for the work, and return its value or raise its error."""
        self.work.wait()
        return super().wait()

    def value(self) -> Any:
        """Return the value of the work, which has ended, or raise its error."""
        self.work.raise_error()
        return super().value()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Call back with this future once it is complete; return a future of what that returns."""
        self.work.settle_in_backward()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call back with this future once it is complete."""
        self.work.settle_in_backward()
        super().add_done_callback(callback)


class GroupWork(Work):
    """Handle of a verb of a process group.

    Attributes:
        title: The verb, for messages.
        outputs: What ``result()`` returns.
        ordering: Of the work on its device; None on the host.
    """

    def __init__(
        self,
        title: str,
        outputs: Sequence[torch.Tensor],
        value: Callable[[], Any] | None = None,
        ordering: StreamOrdering | None = None,
    ) -> None:
        super().__init__()
        self.title, self.outputs, self._value, self.ordering = title, outputs, value, ordering
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self._future: WorkFuture | None = None
        self._inference = torch.is_inference_mode_enabled()

    def complete(self, error: BaseException | None = None) -> None:
        """Mark the work as ended, and complete its future, which runs callbacks."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._fill(future)

    def run(self, program: Callable[[], None]) -> BaseException | None:
        """Run what the work consists of, and complete it; return the error, if there is one."""
        problem: BaseException | None = None
        try:
            with torch.no_grad(), inference_mode(enabled=self._inference), self._running():
                program()
        except BaseException as error:  # noqa: BLE001 - raised by wait(), whatever it is
            problem = error
        self.complete(problem)
        return problem

    def _running(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ordering is None else self.ordering.running()

    def raise_error(self) -> None:
        """Raise the error of the work, if it has ended with one."""
        if self._error is not None:
            raise self._error

    def settle_in_backward(self) -> None:
        """Wait within backward, whose thread would wait for a callback on another one in vain."""
        if not self._ended.is_set() and torch._C._current_graph_task_id() != -1:
            self._wait_until_ended(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the work has ended, and raise its error.

        The thread's current stream of the device waits for what the work has queued there.

        Raises:
            WaitTimeoutError: It has not ended in ``timeout``, which is unlimited if zero; the
                verb has a deadline of its own.
        """
        if not self._ended.is_set():
            seconds = timeout.total_seconds()
            if not self._wait_until_ended(seconds if seconds > 0 else None):
                raise WaitTimeoutError(f"wait: {self.title} was not done in {seconds:g} s")
        self.raise_error()
        self._arrive()
        return True

    def _arrive(self) -> None:
        if self.ordering is not None:
            self.ordering.arrive(list(self.outputs))

    def _wait_until_ended(self, seconds: float | None) -> bool:
        return self.wait_until_completed(seconds)

    def wait_until_completed(self, seconds: float | None) -> bool:
        """Wait for the thread that runs the work; return False if ``seconds`` were not enough."""
        return self._ended.wait(seconds)

    def is_completed(self) -> bool:
        """Return True if the work has ended; what the current stream is given next follows it."""
        ended = self.has_ended()
        if ended:
            self._arrive()
        return ended

    def has_ended(self) -> bool:
        """Return True if the work has ended on the host, with success or an error."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Return True if the work has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the work; None while there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait for the work, and return the tensors that it has written."""
        self.wait()
        return list(self.outputs)

    def synchronize(self) -> None:
        """Do what :meth:`wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank of the group from which a message was received."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future with the tensors that the work writes."""
        with self._lock:
            if self._future is not None:
                return self._future
            devices: list[int | str | torch.device] = [
                *{one.device for one in self.outputs if one.is_cuda}
            ]
            future = WorkFuture(devices=devices) if devices else WorkFuture()
            future.work, self._future = self, future
            ended = self._ended.is_set()
        if ended:
            self._fill(future)
        return future

    def _fill(self, future: WorkFuture) -> None:
        with self._running():  # on whose stream the future records its events
            future.set_result(list(self.outputs) if self._value is None else self._value())
