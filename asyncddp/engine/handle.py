"""Handle of a non-blocking operation: polls for completion, or waits for the result."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from asyncddp.engine.progress_loop import ProgressLoop
from asyncddp.engine.work import Work
from asyncddp.torch_modes import uncompiled

R = TypeVar("R")


class Handle(Generic[R]):
    """Handle of a non-blocking call: polls for completion, or waits for the result.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.allreduce_nonblocking(torch.ones(1)).wait().item())
        [1.0, 1.0]
    """

    def __init__(self, loop: ProgressLoop, work: Work[R]) -> None:
        self._loop, self._work = loop, work

    @uncompiled
    def poll(self) -> bool:
        """Return whether the call has ended, with a result or an error, without waiting."""
        self._loop.progress_unthreaded()
        return self._work.finished

    @uncompiled
    def wait(self, timeout: float | None = None) -> R:
        """Wait for the result, and return it; later calls return the same.

        Args:
            timeout: Seconds to wait at most; the operation goes on when they have passed. None
                leaves it to the operation's own deadline, ``ASYNCDDP_TIMEOUT``.

        Returns:
            The value that the blocking call returns.

        Raises:
            WaitTimeoutError: The time has passed.
            PeerError: The operation has failed because of another rank.
        """
        self._loop.drive(self._work, timeout)
        stream_ordering = self._work.spec.stream_ordering
        if stream_ordering is not None:
            stream_ordering.arrive(self._work.result)
        if self._work.error is not None:
            raise self._work.error
        return cast("R", self._work.result)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it has ended, and notify the peers."""
        with self._loop.lock:
            if not self._work.finished:
                self._work.fail(error)

    @property
    @uncompiled
    def result(self) -> R:
        """The result; waits for it, as :meth:`wait` does."""
        return self.wait()

    def __repr__(self) -> str:
        state = "done" if self._work.finished else "under way"
        return f"<Handle {self._work.describe()} {state}>"
