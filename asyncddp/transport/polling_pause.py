"""Pauses between two polls of a transport: spinning, yielding the core, then sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

_OWN_CORES = 200, 3_000  # attempts that only poll, and those before the first sleep: about 20 ms
_SHARED_CORES = 0, 150  # the same where ranks outnumber cores: about 1 ms
_NAP_ATTEMPTS = 6_000  # half a second, of which most was slept
SLEEP_SECONDS = 0.00005


def outnumber_cores(cores_of_ranks: Iterable[Iterable[int]]) -> bool:
    """Tell whether a machine's ranks outnumber the CPU cores that they may use.

    Example:
        >>> outnumber_cores([[0, 1], [0, 1]]), outnumber_cores([[0], [0]])
        (False, True)
    """
    every = [set(cores) for cores in cores_of_ranks]
    return len(set().union(*every)) < len(every)


class PollingPause:
    """Back-off of one rank's polling: pauses grow as successive polls find nothing.

    Args:
        cores_shared: True where ranks outnumber the cores of the machine.
        sleep: Sleeps for so many seconds, or until there is something to poll.
    """

    def __init__(
        self, *, cores_shared: bool, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._spin, self._awake = _SHARED_CORES if cores_shared else _OWN_CORES
        self._sleep = sleep

    def pause(self, attempt: int, *, background: bool) -> None:
        """Spin if no core is shared, then yield, then sleep; in the background only sleep."""
        if background:
            self._sleep(SLEEP_SECONDS if attempt < 1000 else 10 * SLEEP_SECONDS)
        elif attempt >= self._awake:
            self._sleep(SLEEP_SECONDS if attempt < _NAP_ATTEMPTS else 10 * SLEEP_SECONDS)
        elif attempt >= self._spin:
            os.sched_yield()
