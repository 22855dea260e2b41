"""What a non-blocking verb gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, cast

from asyncddp.memory.modes import uncompiled

if TYPE_CHECKING:
    from asyncddp.engine.engine import Engine
    from asyncddp.engine.operation import Operation

__all__ = ["Handle"]

R = TypeVar("R")


class Handle(Generic[R]):
    """A verb under way.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.allreduce_nonblocking(torch.ones(1)).wait().item())
        [1.0, 1.0]
    """

    def __init__(self, engine: Engine, operation: Operation[R]) -> None:
        self._engine, self._operation = engine, operation

    @uncompiled
    def poll(self) -> bool:
        """Whether the verb has ended, well or not; never waits."""
        self._engine.nudge()
        return self._operation.finished.is_set()

    @uncompiled
    def wait(self, timeout: float | None = None) -> R:
        """Wait for the verb's result; every further call gives the same.

        Args:
            timeout: Seconds to wait at most; the verb goes on when they have passed. None leaves
                it to the verb's own deadline, ``ASYNCDDP_TIMEOUT``.

        Returns:
            What the blocking verb returns.

        Raises:
            WaitTimeoutError: The time has passed.
            PeerError: The verb has failed because of another rank.
        """
        self._engine.drive(self._operation, timeout)
        order = self._operation.program.order
        if order is not None:
            order.arrive(self._operation.result)
        if self._operation.error is not None:
            raise self._operation.error
        return cast("R", self._operation.result)

    @property
    @uncompiled
    def result(self) -> R:
        """The same as :meth:`wait`."""
        return self.wait()

    def __repr__(self) -> str:
        state = "done" if self._operation.finished.is_set() else "under way"
        return f"<Handle {self._operation.describe()} {state}>"
