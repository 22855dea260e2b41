"""What a wrapper lets its user do about windows: meet, look how old they are, free them."""

from __future__ import annotations

from asyncddp.algorithms.mixer import Mixer
from asyncddp.windows import Staleness

__all__ = ["WindowControls"]


class WindowControls:
    """The part of the wrapper that concerns one-sided methods; with others it has no effect."""

    _mixer: Mixer

    @property
    def force_barrier(self) -> bool:
        """Whether all ranks meet before and after they mix, so that no round is asynchronous.

        False at first; may be set before any round, on all ranks.
        """
        return self._mixer.force_barrier

    @force_barrier.setter
    def force_barrier(self, value: bool) -> None:
        """Meet before each round, or no more."""
        self._mixer.force_barrier = value

    @property
    def max_staleness(self) -> int | None:
        """How many steps a neighbour may be behind before it is waited for; None: any number."""
        return self._mixer.max_staleness

    def staleness(self) -> dict[int, Staleness]:
        """How old what was mixed last is.

        Returns:
            By in-neighbour, as :func:`win_staleness` gives it, of the bucket where that is worst: a
            tuple ``(version, steps, seconds, lag)``, ``lag`` being by how many steps the neighbour
            was behind this rank. A step is an averaging.
        """
        return self._mixer.windows.staleness()

    @property
    def departed(self) -> tuple[int, ...]:
        """In-neighbours that had left in the last averaging, ascending.

        One has left when it has averaged fewer times than this rank and does so no more: it has
        said so by :meth:`conclude`, its script has ended, or it has made no step for more than 100
        averagings of this rank and more than 20 times as many as it usually takes. Its weight, or
        share, is this rank's own until it makes a step again.
        """
        return self._mixer.windows.departed

    def conclude(self) -> None:
        """Say that no step follows here for now: nobody waits for this rank or mixes with it.

        A rank that has fewer steps to make than its neighbours calls it when it has made them,
        unless its script ends there; :func:`join` does. The next step takes it back.
        """
        self._mixer.windows.conclude()

    def unregister_windows(self) -> None:
        """Free the windows; collective.

        The next averaging, should there be one, makes them anew along the topology of then, which
        is collective too. Without this call they are freed with the world: a wrapper that is
        dropped leaves its windows alone, since its peers may be reading them.

        Raises:
            WaitTimeoutError: A rank has not come by the deadline.
        """
        self._mixer.windows.free()

    unregister_window = unregister_windows
