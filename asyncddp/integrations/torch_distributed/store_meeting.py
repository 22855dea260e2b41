"""Barriers through torch.distributed's key-value store, which name the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from torch._C._distributed_c10d import Store

from asyncddp.errors import WaitTimeoutError
from asyncddp.rank_list_text import list_ranks

_POLL_SECONDS = 0.002  # seconds between the first looks
_LONG_POLL_SECONDS = 0.05  # seconds between later ones


def meet_in_store(
    store: Store, what: str, ranks: Sequence[int], place: int, timeout: float, key: str = "here"
) -> None:
    """Wait until all ranks of a group have called it with the same key.

    Args:
        store: The group's part of torch's store.
        what: Action of the ranks, for the message.
        ranks: The ranks of the world in the group.
        place: Index of this rank among them.
        timeout: Seconds until the error.
        key: Key in the store; used once.

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
    """Wait for the keys of the given places until a timeout; return the places without a key."""
    deadline, pause = time.monotonic() + timeout, _POLL_SECONDS
    left = list(places)
    while True:
        left = [place for place in left if not store.check([f"{key}/{place}"])]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(pause)
        pause = min(1.5 * pause, _LONG_POLL_SECONDS)
