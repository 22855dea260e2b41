"""Calls that a verb has begun without the engine, and whose rest no thread drives yet."""

from __future__ import annotations

from collections.abc import Collection, Sized


class DeferredCalls:
    """Deferred calls of one rank; this class is for an engine that has none.

    Attributes:
        unsent: Calls whose tensors are yet to be sent: before anything else of this rank is.
        names: The names under which they are.
    """

    unsent: Sized = ()
    names: Collection[str] = ()

    def send(self) -> None:
        """Send the tensors of all calls that are yet to be sent."""

    def hand_to_engine(self, age: float) -> None:
        """Let the engine go on with calls that were sent so many seconds ago, or longer."""

    def end_after_fork(self, why: str) -> None:
        """End all calls with an error in a forked process, telling no peer."""
