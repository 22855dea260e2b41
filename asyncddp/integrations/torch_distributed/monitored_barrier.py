"""Barrier that names the ranks which do not come, by keys of torch's store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncddp.errors import ArgumentError, WaitTimeoutError
from asyncddp.integrations.torch_distributed.group_channel import GroupChannel
from asyncddp.integrations.torch_distributed.store_meeting import missing_after
from asyncddp.rank_list_text import list_ranks


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks of a group; the error of a missing rank names it, on all ranks.

    ``torch.distributed.monitored_barrier`` refuses every backend but gloo; this is the same call.

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
    if not hasattr(chosen, "channel"):
        raise ArgumentError(
            f"monitored_barrier: expected a group of backend asyncddp, got one of {chosen.name()}"
        )
    chosen.monitored_barrier(timeout, wait_all_ranks)


def wait_monitored(
    channel: GroupChannel,
    store: Store,
    number: int,
    timeout: timedelta | None,
    *,
    wait_all_ranks: bool,
) -> None:
    """Wait for all ranks of a group in its monitored barrier of a number.

    Rank 0 waits for the others, and tells them the outcome.
    """
    channel.require_working("monitored_barrier")
    seconds = channel.timeout if timeout is None else timeout.total_seconds()
    key, me = f"monitored/{number}", channel.rank
    store.set(f"{key}/{me}", "1")
    if me:
        outcome = _outcome_of_root(store, key, channel.ranks[0], seconds)
    else:
        outcome = _missing_ranks(channel, store, key, seconds, every=wait_all_ranks)
        store.set(f"{key}/outcome/0", outcome)
    if outcome:
        raise WaitTimeoutError(
            f"rank {channel.ranks[me]}: monitored_barrier was not done in {seconds:g} s; {outcome}"
        )


def _outcome_of_root(store: Store, key: str, root: int, seconds: float) -> str:
    if missing_after(store, f"{key}/outcome", [0], 1.5 * seconds):  # the root waits as long, too
        return f"missing: rank {root}"
    return store.get(f"{key}/outcome/0").decode()


def _missing_ranks(
    channel: GroupChannel, store: Store, key: str, seconds: float, *, every: bool
) -> str:
    missing = missing_after(store, key, range(1, channel.size), seconds)
    if not missing:
        return ""
    named = missing if every else missing[:1]
    return f"missing: {list_ranks(channel.ranks[place] for place in named)}"
