"""DistributedOptimizer's controls of averaging through one-sided windows, such as staleness."""

from __future__ import annotations

from asyncddp.algorithms.neighbor_progress import NeighborProgressMixin


class WindowControlsMixin(NeighborProgressMixin):
    """Mixin of DistributedOptimizer: barriers, staleness and freeing of its one-sided windows.

    With algorithms that use no windows it has no effect.
    """

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
        """Number of steps that a neighbour may lag before this rank waits; None for any."""
        return self._averager.max_staleness

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
