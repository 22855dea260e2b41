"""Barrier that names missing ranks, through keys of torch.distributed's key-value store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncddp.errors import ArgumentError, WaitTimeoutError
from asyncddp.integrations.torch_distributed.store_meeting import missing_after
from asyncddp.rank_list_text import list_ranks


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks of a group; on a timeout the error names missing ranks, on all ranks.

    ``torch.distributed.monitored_barrier`` accepts only gloo; this is the same call.

    Args:
        group: A group of the backend ``asyncddp``; the default group if None.
        timeout: How long to wait; the group's timeout if None.
        wait_all_ranks: Wait for the timeout of all ranks, and name all that are missing, in place
            of the first one.

    Raises:
        ArgumentError: The group is another backend's.
        WaitTimeoutError: A rank has not come.
    """
    chosen: Any = dist.distributed_c10d._get_default_group() if group is None else group
    if not hasattr(chosen, "monitored_barrier"):
        raise ArgumentError(
            f"monitored_barrier: expected a group of backend asyncddp, got one of {chosen.name()}"
        )
    chosen.monitored_barrier(timeout, wait_all_ranks)


def wait_monitored(
    store: Store, ranks: Sequence[int], place: int, number: int, seconds: float, every: bool
) -> None:
    """Wait for all ranks of a group in its monitored barrier of the given number.

    The first rank waits for the others, and tells them the missing ranks: all if ``every``, or one.
    """
    key = f"monitored/{number}"
    store.set(f"{key}/{place}", "1")
    outcome = ""
    if not place:
        missing = missing_after(store, key, range(1, len(ranks)), seconds)
        if missing:
            named = missing if every else missing[:1]
            outcome = f"missing: {list_ranks(ranks[other] for other in named)}"
        store.set(f"{key}/outcome/0", outcome)
    elif missing_after(store, f"{key}/outcome", [0], 1.5 * seconds):  # it waits as long, too
        outcome = f"missing: rank {ranks[0]}"
    else:
        outcome = store.get(f"{key}/outcome/0").decode()
    if outcome:
        raise WaitTimeoutError(
            f"rank {ranks[place]}: monitored_barrier was not done in {seconds:g} s; {outcome}"
        )
