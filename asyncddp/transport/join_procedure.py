"""Interface by which a replacement process joins a run in the place of a lost rank."""

from __future__ import annotations

from typing import Protocol


class JoinProcedure(Protocol):
    """Interface by which a replacement process joins a run in the place of a lost rank."""

    def ask_to_be_let_in(self) -> None:
        """Ask the others for a view with this rank."""
        ...

    def refusal(self) -> str:
        """Return why the others do not let this rank in; empty if they have not said so."""
        ...

    def finish(self) -> None:
        """Take part, and let the next process join."""
        ...
