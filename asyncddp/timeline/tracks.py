"""Numbers of a rank's tracks (rows of the timeline) for activities, threads and transfers."""

from __future__ import annotations

TRANSFER_TRACK = 0
"""Placeholder for whichever track of transfers is free."""
COMPUTATION, COMMUNICATION, MIXING = 1, 2, 3
TRANSFERS = 100


def activity_track(number: int) -> int:
    """Return the track of the user's activities for one thread and one tensor."""
    return 10 + number if number < 40 else 10_000 + number


def thread_track(number: int) -> int:
    """Return the track of an additional communicating thread."""
    return 50 + number if number < 50 else 20_000 + number


class TransferTrackAllocator:
    """Allocator of timeline tracks (rows); transfers on the same track never overlap."""

    def __init__(self) -> None:
        self._free_from: list[int] = []

    def allocate(self, begin: int, end: int) -> int:
        """Return the lowest free track; call it for spans in order of their ends."""
        for track, since in enumerate(self._free_from):
            if since <= begin:
                self._free_from[track] = end
                return TRANSFERS + track
        self._free_from.append(end)
        return TRANSFERS + len(self._free_from) - 1
