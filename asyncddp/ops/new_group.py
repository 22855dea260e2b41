"""``new_group``: creates a process group of some ranks."""

from __future__ import annotations

from collections.abc import Iterable

from asyncddp.context import Context, current
from asyncddp.engine.messages import GROUP_COLLECTIVE
from asyncddp.errors import ArgumentError
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.process_group import ProcessGroup, require_member
from asyncddp.ops.settings_agreement import require_equal_on_all_ranks
from asyncddp.ops.validation import check_rank
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.shm.collective_slots import CollectiveSlots, SlotMemory
from asyncddp.transport.shared_memory.group_formation import subgroup

_COUNT = "number of process groups"


def new_group(ranks: Iterable[int] | None = None) -> ProcessGroup:
    """Create a group of ranks for the ``group`` argument of verbs; collective over all ranks.

    Only members call verbs with it. Its members call the group's collectives in the same order;
    collectives of other groups and of all ranks may come in between, and never match these.

    Args:
        ranks: The ranks, in any order, the same on all ranks; all by default.

    Returns:
        The group, also on ranks that are not members.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No rank, a rank given twice, or one that does not exist.
        MismatchError: Another rank gives other ranks.

    Example:
        >>> import asyncddp as bf, torch
        >>> def sum_of_even_ranks():
        ...     even = bf.new_group([0, 2])
        ...     x = torch.tensor([bf.rank()])
        ...     return bf.allreduce(x, op="sum", group=even).item() if bf.rank() in even else None
        >>> with bf.local_world(3) as world:
        ...     world.run(sum_of_even_ranks)
        [2, None, 2]
    """
    context = current()
    wanted = context.members if ranks is None else ranks
    members = sorted(check_rank("new_group", "ranks", rank, context.size) for rank in wanted)
    if not members or len(set(members)) != len(members):
        raise ArgumentError(
            f"new_group: argument ranks: expected at least one rank, and each once, got {members}"
        )
    if members != [context.rank]:
        require_member("new_group", context)
    membership = context.engine.membership
    joined = 0 if membership is None else membership.last_join
    counted = f"{_COUNT} since view {joined}"
    number = context.extensions.get(counted, 0) + 1
    claim = "new_group needs the same ranks, in calls of the same order, on all ranks"
    require_equal_on_all_ranks(context, claim, [f"ranks {members} in call {number}"])
    context.extensions[counted] = number
    name = GROUP_COLLECTIVE.format(f"{number} since view {joined}" if joined else number)
    slots = None if joined else _open_slots(context, members)  # a replacement has no slots
    if slots is not None:
        context.engine.matcher.slots[name] = slots
    return ProcessGroup(tuple(members), context, name, view=joined)


def _open_slots(context: Context, members: list[int]) -> CollectiveSlots | None:
    """Open slots for a group if its members share memory; collective over all ranks."""
    if context.transport.collective_slots is None:
        return None
    shared = subgroup(context.transport.shared_memory_group, members)
    if context.rank not in members or len(members) == 1:
        shared = None
    mine = [] if shared is None else [SlotMemory.allocate(shared.arena, len(members))]
    records = gather_records(mine, list[SharedMemoryHandle], "new_group")
    every = dict(zip(context.members, records, strict=True))
    handles = [handle for rank in members for handle in every[rank]]
    if shared is None or len(handles) < len(members):
        return None
    memory = SlotMemory.map(shared.arena, list(shared.processes.values()), handles)
    return CollectiveSlots(memory, members.index(context.rank), members)
