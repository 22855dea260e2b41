"""Turns of proposers, by time, so that ranks do not outbid each other for ever."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_LONGEST_WAIT = 16  # the factor to which the time between two attempts grows


class ProposerTurns:
    """Times at which a rank proposes: the first candidate at once, each later one after a delay.

    ``clock`` is the time that has passed for this rank. A rank that was paused finds old answers in
    its inbox: a pause counts as half a patience.
    """

    def __init__(self, patience: float) -> None:
        self.patience, self.clock = patience, 0.0
        self._last: float | None = None
        self.begin()

    def begin(self) -> None:
        """Begin without a need for a view."""
        self._due: float | None = None
        self._accused: Collection[int] = ()
        self._wait = 1

    def advance(self, now: float) -> None:
        """Let time pass."""
        passed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self.clock += min(passed, self.patience / 2)
        self._last = now

    def is_due(
        self, rank: int, candidates: Sequence[int], accused: Collection[int], *, at_once: bool
    ) -> bool:
        """Return whether it is a rank's turn, which takes the turn, to remove the accused."""
        if self._due is None or accused != self._accused:
            place = candidates.index(rank) if rank in candidates else len(candidates)
            self._due, self._accused = self.clock + self.patience * place, accused
        if self.clock < self._due and not at_once:
            return False
        self._due = self.clock + self.patience * max(1, len(candidates)) * self._wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        return True
