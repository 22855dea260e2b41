r"""Offset of rank 0's clock from another rank's, estimated from round trips.

A rank asks at :math:`t_1`, and rank 0's answer, its time :math:`t_0`, arrives at :math:`t_2`. Then
its clock is ahead by :math:`t_0 - \tfrac{1}{2} (t_1 + t_2) \pm \tfrac{1}{2} (t_2 - t_1)`.

Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ClockSample(NamedTuple):
    """Offset of rank 0's clock from this rank's, with the time at which it was measured, in ns."""

    time: int
    offset: int
    error: int

    @classmethod
    def from_round_trip(cls, sent: int, answer: int, received: int) -> ClockSample:
        """Estimate the offset from the times of a request, its answer and the answer's arrival."""
        middle = (sent + received) // 2
        return cls(middle, answer - middle, max(1, (received - sent + 1) // 2))


def most_precise(samples: Iterable[ClockSample]) -> ClockSample:
    """Select the sample with the smallest error."""
    return min(samples, key=lambda sample: sample.error)
