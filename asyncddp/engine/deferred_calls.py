"""Interface of deferred calls: non-blocking operations not yet submitted to the progress engine."""

from __future__ import annotations

from collections.abc import Collection, Sized


class DeferredCalls:
    """Base class of a rank's queue of deferred calls; by itself an empty queue.

    Attributes:
        unsent: Calls with tensors to be sent, before anything else of this rank is sent.
        names: The names of the calls.
    """

    unsent: Sized = ()
    names: Collection[str] = ()

    def send(self) -> None:
        """Send the tensors of all unsent calls."""

    def hand_to_engine(self, age: float) -> None:
        """Submit to the engine all calls that were sent at least ``age`` seconds ago."""

    def end_after_fork(self, why: str) -> None:
        """End all calls with an error in a forked process, without notifying peers."""
