"""Meetings of ranks in torch's store, which name the ranks that do not come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from torch._C._distributed_c10d import Store

from asyncddp.errors import WaitTimeoutError
from asyncddp.rank_list_text import list_ranks

_POLL_SECONDS = 0.002  # seconds between the first looks
_LONG_POLL_SECONDS = 0.05  # seconds between later ones
_GRACE = 0.5  # seconds for which a rank that is missing may be late in saying so


def meet_in_store(
    store: Store, what: str, ranks: Sequence[int], place: int, timeout: float, key: str = "here"
) -> None:
    """Wait until all ranks of a group have called this with the same key.

    Args:
        store: The group's part of torch's store.
        what: What the ranks do, for the message.
        ranks: The ranks of the world in the group.
        place: The place of this rank among them.
        timeout: Seconds until the error.
        key: Where in the store; used once.

    Raises:
        WaitTimeoutError: Some ranks have not come; the message names them.
    """
    store.set(f"{key}/{place}", "1")
    missing = missing_after(store, key, range(len(ranks)), timeout)
    if missing:
        raise WaitTimeoutError(
            f"rank {ranks[place]}: {what} was not done in {timeout:g} s; missing: "
            f"{list_ranks(ranks[other] for other in missing)}"
        )


def missing_after(store: Store, key: str, places: Iterable[int], timeout: float) -> list[int]:
    """Wait for the keys of some places, for so many seconds, and return the places without one."""
    deadline, pause = time.monotonic() + timeout, _POLL_SECONDS
    left = list(places)
    while True:
        left = [place for place in left if not store.check([f"{key}/{place}"])]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(pause)
        pause = min(1.5 * pause, _LONG_POLL_SECONDS)


class WaitAnnouncements:
    """Waits of each rank of a group, told through torch's store.

    A rank announces a collective only when it has waited for a while, so that in ordinary runs
    nothing is written. One whose deadline has passed reads the announcements of the others.
    """

    def __init__(self, store: Store, ranks: Sequence[int], place: int) -> None:
        self._store, self._ranks, self._place = store, ranks, place

    @staticmethod
    def delay(timeout: float) -> float:
        """Return the seconds after which a wait is announced, and by which a deadline is late."""
        return min(_GRACE, timeout / 4)

    def announce(self, number: int, verb: str) -> None:
        """Tell the others that this rank waits in its collective of a number."""
        try:
            self._store.set(f"waits/{self._place}", f"{number} {verb}")
        except RuntimeError:  # the rank with the store is gone; the deadline will tell
            return

    def explain(self, number: int, verb: str) -> str:
        """Return which ranks have not come to a collective, or called another verb in it."""
        try:
            found = [self._read(place) for place in range(len(self._ranks))]
        except RuntimeError as error:
            return f"torch's store cannot be asked who is missing: {error}"
        missing = [rank for rank, (at, _) in zip(self._ranks, found, strict=True) if at < number]
        if missing:
            return f"missing: {list_ranks(missing)}"
        others = [
            f"rank {rank} is in {other}"
            for rank, (at, other) in zip(self._ranks, found, strict=True)
            if at == number and other != verb
        ]
        return "; ".join(others) or "all ranks have come to it"

    def _read(self, place: int) -> tuple[int, str]:
        key = f"waits/{place}"
        if not self._store.check([key]):
            return 0, ""
        number, _, verb = self._store.get(key).decode().partition(" ")
        return int(number), verb
