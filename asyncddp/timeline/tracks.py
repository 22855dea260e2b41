"""The rows of a rank in the timeline, and which of them a span goes to."""

from __future__ import annotations

__all__ = [
    "COMMUNICATION",
    "COMPUTATION",
    "LANE",
    "MIXING",
    "TRANSFERS",
    "Lanes",
    "activity",
    "caller",
]

LANE = 0
"""In place of a track: whichever lane of transfers is free."""
COMPUTATION, COMMUNICATION, MIXING = 1, 2, 3
TRANSFERS = 100


def activity(number: int) -> int:
    """The track of the user's own activities in one thread and about one tensor."""
    return 10 + number if number < 40 else 10_000 + number


def caller(number: int) -> int:
    """The track of a thread that communicates beside the one that does first."""
    return 50 + number if number < 50 else 20_000 + number


class Lanes:
    """Gives each transfer a track on which nothing else happens meanwhile.

    Example:
        >>> lanes = Lanes()
        >>> [lanes.place(begin, end) for begin, end in ((0, 5), (3, 6), (6, 9))]
        [100, 101, 100]
    """

    def __init__(self) -> None:
        self._free_from: list[int] = []

    def place(self, begin: int, end: int) -> int:
        """The lowest track that is free in between; spans come in the order of their ends."""
        for lane, since in enumerate(self._free_from):
            if since <= begin:
                self._free_from[lane] = end
                return TRANSFERS + lane
        self._free_from.append(end)
        return TRANSFERS + len(self._free_from) - 1
