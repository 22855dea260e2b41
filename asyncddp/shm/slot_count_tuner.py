"""Choice of the number of ring-buffer slots for large tensors, few or many, by measurement.

Writing a chunk into a slot that the reader still has in its cache is faster if the two ranks share
that cache, and several times slower if they do not. With more slots in use, the cache drops a slot
before it is written again.
"""

from __future__ import annotations

import statistics

FEW, MANY = 4, 16
_TRIALS = 3  # tensors by each number of slots
_PERIOD = 512  # tensors after which both are tried again: processes move between cores


class SlotCountTuner:
    """One rank's choice between few and many slots for large tensors, from timed copies.

    >>> cycle = SlotCountTuner()
    >>> for seconds in (3.0, 1.0) * 3:
    ...     slots = cycle.next()
    ...     cycle.record(slots, [seconds])
    >>> cycle.next()
    16
    """

    def __init__(self) -> None:
        self._tensors = 0
        self._seconds: dict[int, list[float]] = {FEW: [], MANY: []}
        self.chosen = FEW
        self.tries = True
        """True if the copies of the current tensor are to be timed."""

    def next(self) -> int:
        """Return the number of slots for the next tensor."""
        number = self._tensors % _PERIOD
        self._tensors += 1
        self.tries = number < 2 * _TRIALS
        if self.tries:
            return (FEW, MANY)[number % 2]
        if number == 2 * _TRIALS and all(self._seconds.values()):
            self.chosen = min(self._seconds, key=lambda slots: min(self._seconds[slots]))
            self._seconds = {FEW: [], MANY: []}
        return self.chosen

    def record(self, slots: int, seconds: list[float]) -> None:
        """Record the copy time of each chunk of a tensor, for a number of slots."""
        self._seconds[FEW if slots == FEW else MANY].append(statistics.median(seconds))
