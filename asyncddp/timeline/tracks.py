"""Numbering of a rank's tracks, the rows of the timeline: activities, threads and transfers."""

from __future__ import annotations

TRANSFER_TRACK = 0
"""Placeholder for whichever track of transfers is free."""
COMPUTATION, COMMUNICATION, MIXING = 1, 2, 3
TRANSFERS = 100


def activity_track(number: int) -> int:
    """Return the track of the user's activities in one thread about one tensor."""
    return 10 + number if number < 40 else 10_000 + number


def thread_track(number: int) -> int:
    """Return the track of a further thread that communicates."""
    return 50 + number if number < 50 else 20_000 + number


class TransferTrackAllocator:
    """Allocator of timeline tracks (rows), such that transfers on one track never overlap."""

    def __init__(self) -> None:
        self._free_from: list[int] = []

    def allocate(self, begin: int, end: int) -> int:
        """Return the lowest free track; spans must come in the order of their ends."""
        for track, since in enumerate(self._free_from):
            if since <= begin:
                self._free_from[track] = end
                return TRANSFERS + track
        self._free_from.append(end)
        return TRANSFERS + len(self._free_from) - 1
