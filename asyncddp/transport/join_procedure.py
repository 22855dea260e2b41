"""Joining of a run by a process that takes a lost rank's place, as the rooms above see it."""

from __future__ import annotations

from typing import Protocol


class JoinProcedure(Protocol):
    """Interface of the joining of a run by a process that takes a lost rank's place."""

    def ask_to_be_let_in(self) -> None:
        """Ask the others for a view with this rank."""
        ...

    def refusal(self) -> str:
        """Return why the others do not let this rank in; empty if they have not said so."""
        ...

    def finish(self) -> None:
        """Take part, and let the next process join."""
        ...
