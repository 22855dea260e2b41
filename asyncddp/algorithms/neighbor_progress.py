"""Progress of neighbours, and this rank's own end, for users of an averager."""

from __future__ import annotations

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.windows import Staleness


class NeighborProgressMixin:
    """Mixin that tells how far neighbours have trained, and tells them when this rank ends."""

    @property
    def _averager(self) -> ModelAverager:
        """The averager in use."""
        raise NotImplementedError

    def staleness(self) -> dict[int, Staleness]:
        """Return how old the tensors used in the last averaging were.

        Returns:
            By in-neighbour, as :func:`win_staleness` gives it, of the bucket where that is worst: a
            tuple ``(version, steps, seconds, lag)``, ``lag`` being by how many steps the neighbour
            was behind this rank. A step is an averaging. Empty where ranks wait for each other.
        """
        return self._averager.windows.staleness()

    @property
    def departed(self) -> tuple[int, ...]:
        """In-neighbours that had departed in the last averaging, ascending.

        One has departed when it was killed or has raised, or when it has averaged fewer times than
        this rank and does so no more: it has announced so by :meth:`conclude`, its script has
        ended, or it has made no step for more than 100 averagings of this rank and more than 20
        times as many as it usually takes. Its weight, or share, is this rank's own until it makes a
        step again. None where ranks wait for each other.
        """
        return self._averager.windows.departures.now

    def conclude(self) -> None:
        """Announce that no step follows here for now: no rank waits for this one or mixes with it.

        A rank that has fewer steps to make than its neighbours calls it when it has made them,
        unless its script ends there; :func:`join` does. The next step takes it back. Where a method
        that averages rarely has not averaged once, or fewer than ten times with momentum of 0.9
        between rounds, a warning on rank 0 says so, here or in the end.
        """
        self._averager.windows.conclude()
