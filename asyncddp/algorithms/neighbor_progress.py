"""Mixin of optimizer and model wrappers: reports neighbours' staleness and departures."""

from __future__ import annotations

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.windows import Staleness


class NeighborProgressMixin:
    """Mixin that reports neighbours' staleness and departures, and announces this rank's end."""

    @property
    def _averager(self) -> ModelAverager:
        """Averager in use."""
        raise NotImplementedError

    def staleness(self) -> dict[int, Staleness]:
        """Return the staleness of the neighbours' tensors in the last averaging.

        Returns:
            By in-neighbour, as :func:`win_staleness` gives it, for the stalest bucket: a tuple
            ``(version, steps, seconds, lag)``, with ``lag`` the number of steps by which the
            neighbour was behind this rank. A step is an averaging. Empty if ranks wait for each
            other.
        """
        return self._averager.windows.staleness()

    @property
    def departed(self) -> tuple[int, ...]:
        """In-neighbours that had departed by the last averaging, ascending.

        A neighbour has departed if it was killed or has raised, or if it has averaged fewer times
        than this rank and averages no more: it has called :meth:`conclude`, its script has ended,
        or it has made no step for more than 100 averagings of this rank and more than 20 times as
        many as it usually takes. Its weight, or share, is added to this rank's own until it makes a
        step again. Empty if ranks wait for each other.
        """
        return self._averager.windows.departures.now

    def conclude(self) -> None:
        """Announce that this rank makes no step for now: no rank waits for it or mixes with it.

        A rank with fewer steps than its neighbours calls it after its last step, unless its script
        ends there; :func:`join` calls it. The next step revokes it. If a method that averages
        rarely has not averaged at all, or fewer than ten times with momentum of 0.9 between rounds,
        rank 0 logs a warning, here or at the end.
        """
        self._averager.windows.conclude()
