"""Queue of a group's collectives: one at a time, in the order of their calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch

from asyncddp.device.stream_interfaces import mark_library_thread
from asyncddp.integrations.torch_distributed.work import GroupWork

_ALIVE = 256  # works that are kept after their end: torch's C++ may still hold the object
_ALIVE_BYTES = 1 << 16  # of the tensors of each
Program: TypeAlias = Callable[[], None]


class QueuedWork(GroupWork):
    """Work of a collective, which runs when all earlier ones of its group have ended."""

    queue: WorkQueue
    program: Program

    def _wait_until_ended(self, seconds: float | None) -> bool:
        return self.queue.wait_for(self, seconds)


class WorkQueue:
    """First in, first out, on a thread of its own, or on threads that wait for a work.

    A blocking work runs on the caller's thread where nothing is under way. One that is submitted by
    a callback of a work that is running runs at once: the order is the same on all ranks, and
    nobody else could run it.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._waiting: deque[QueuedWork] = deque()
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held while a work runs
        self._runner: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._waiters = 0
        self._in_background = False
        self._alive: deque[GroupWork] = deque(maxlen=_ALIVE)

    @property
    def patient(self) -> bool:
        """True if a work runs beside a computation, and nobody waits for any."""
        return self._in_background and not self._waiters

    def submit(self, work: QueuedWork, program: Program, *, blocking: bool) -> None:
        """Run a work at once if it is ``blocking`` and nothing is under way, or let it wait."""
        work.queue, work.program = self, program
        if sum(one.nbytes for one in work.outputs) <= _ALIVE_BYTES:
            self._alive.append(work)
        if self._runner == threading.get_ident():
            _run_program(work)
            return
        if blocking and not self._waiting and self._turn.acquire(blocking=False):
            if not self._waiting:
                self._run(work, background=False)
                return
            self._turn.release()
        with self._changed:
            self._waiting.append(work)
            self._start_thread()
            self._changed.notify()

    def wait_for(self, work: QueuedWork, seconds: float | None) -> bool:
        """Wait until a work has ended, and run waiting ones meanwhile unless another thread does.

        With ``seconds`` it only waits, and returns False if that was not enough.
        """
        if self._runner == threading.get_ident():  # within a callback, where the turn is taken
            while not work.has_ended() and self._waiting:
                _run_program(self._waiting.popleft())
        self._waiters += 1
        try:
            while seconds is None and not work.has_ended() and self._turn.acquire(False):
                if not self._run_next(background=False):
                    break
            return work.wait_until_completed(seconds)
        finally:
            self._waiters -= 1

    def close(self) -> None:
        """Run what is waiting, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run_next(self, *, background: bool) -> bool:
        """Run the first waiting work; the caller has taken the turn, and it is given back."""
        try:
            work = self._waiting.popleft()
        except IndexError:
            self._turn.release()
            return False
        self._run(work, background=background)
        return True

    def _run(self, work: QueuedWork, *, background: bool) -> None:
        """Run a work; the caller has taken the turn, and it is given back."""
        self._runner = threading.get_ident()
        self._in_background = background
        try:
            error = _run_program(work)
        finally:
            self._runner = None
            self._turn.release()
        if self._waiting:
            with self._changed:
                self._changed.notify()
        if error is not None and not isinstance(error, Exception):
            raise error  # such as KeyboardInterrupt

    def _start_thread(self) -> None:
        if self._thread is None:
            name = f"asyncddp: {self._title}"
            self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        mark_library_thread()
        while self._wait_for_work():
            self._turn.acquire()
            self._run_next(background=True)

    def _wait_for_work(self) -> bool:
        """Wait until a work is waiting; return False once the queue is closed and empty."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return False
                self._changed.wait()
        return True


def _run_program(work: QueuedWork) -> BaseException | None:
    program = work.program
    del work.program  # it holds tensors
    return work.run(program)
