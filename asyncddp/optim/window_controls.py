"""DistributedOptimizer's controls of averaging through one-sided windows, such as staleness."""

from __future__ import annotations

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.windows import Staleness


class WindowControlsMixin:
    """Mixin of DistributedOptimizer: barriers, staleness and freeing of its one-sided windows.

    With algorithms that use no windows it has no effect.
    """

    _averager: ModelAverager

    @property
    def force_barrier(self) -> bool:
        """Whether all ranks synchronise before and after each averaging, so that none is async.

        False at first; may be set before any round, on all ranks.
        """
        return self._averager.force_barrier

    @force_barrier.setter
    def force_barrier(self, value: bool) -> None:
        """Turn the barriers around each round on or off."""
        self._averager.force_barrier = value

    @property
    def max_staleness(self) -> int | None:
        """Number of steps that a neighbour may lag before this rank waits for it; None: any."""
        return self._averager.max_staleness

    def staleness(self) -> dict[int, Staleness]:
        """Return how old the tensors used in the last averaging were.

        Returns:
            By in-neighbour, as :func:`win_staleness` gives it, of the bucket where that is worst: a
            tuple ``(version, steps, seconds, lag)``, ``lag`` being by how many steps the neighbour
            was behind this rank. A step is an averaging.
        """
        return self._averager.windows.staleness()

    @property
    def departed(self) -> tuple[int, ...]:
        """List the in-neighbours that had departed in the last averaging, ascending.

        One has departed when it has averaged fewer times than this rank and does so no more: it
        has announced so by :meth:`conclude`, its script has ended, or it has made no step for more
        than 100 averagings of this rank and more than 20 times as many as it usually takes. Its
        weight, or share, is this rank's own until it makes a step again.
        """
        return self._averager.windows.departed

    def conclude(self) -> None:
        """Announce that no step follows here for now: no rank waits for this one or mixes with it.

        A rank that has fewer steps to make than its neighbours calls it when it has made them,
        unless its script ends there; :func:`join` does. The next step takes it back.
        """
        self._averager.windows.conclude()

    def unregister_windows(self) -> None:
        """Free the windows; collective.

        The next averaging, should there be one, makes them anew along the topology of then, which
        is collective too. Without this call they are freed with the world: a wrapper that is
        dropped leaves its windows alone, since its peers may be reading them.

        Raises:
            WaitTimeoutError: A rank has not come by the deadline.
        """
        self._averager.windows.free()

    unregister_window = unregister_windows
