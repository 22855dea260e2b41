"""Formation of the group of ranks that can map each other's shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from asyncddp.shm.arena import Arena, SharedMemoryHandle, handle_of_block
from asyncddp.shm.collective_slots import CollectiveSlots, SlotMemory
from asyncddp.transport.base import SharedMemoryGroup

T = TypeVar("T")
_MAGIC = 0x41_44_44_50


class RecordGatherer(Protocol):
    """Interface of collective functions that gather one record per rank of this machine."""

    def __call__(self, mine: T, kind: type[T], /) -> list[T]:
        """Return the records in rank order."""
        ...


class _MappingTestPage(NamedTuple):
    """Shared page of a rank, by which other ranks test if they can map that rank's memory."""

    rank: int
    process: int
    page: SharedMemoryHandle | None


def form_group(gather: RecordGatherer, rank: int) -> tuple[SharedMemoryGroup | None, str | None]:
    """Map each other's test pages; return the group, or the reason for failure; collective.

    ``gather`` is between the ranks of this machine, of which there are several; ``rank`` is this
    one among all ranks.
    """
    arena = Arena()
    page, problem = _publish_test_page(arena)
    pages = gather(_MappingTestPage(rank, os.getpid(), page), _MappingTestPage)
    problems = gather(problem or _verify_test_pages(arena, pages), str)
    if any(problems):
        return None, next(filter(None, problems))
    return SharedMemoryGroup(arena, {one.rank: one.process for one in pages}), None


def subgroup(known: SharedMemoryGroup | None, members: Sequence[int]) -> SharedMemoryGroup | None:
    """Return the group in which ``members[r]`` is rank r; None if not all share memory."""
    if known is None or not all(rank in known.processes for rank in members):
        return None
    processes = {new_rank: known.processes[rank] for new_rank, rank in enumerate(members)}
    return SharedMemoryGroup(known.arena, processes)


def open_slots(
    group: SharedMemoryGroup | None, size: int, rank: int, gather: RecordGatherer
) -> CollectiveSlots | None:
    """Open slots for collectives of some ranks, if all share memory; collective in that case."""
    if group is None or len(group.processes) < max(2, size):
        return None
    handles = gather(SlotMemory.allocate(group.arena, size), SharedMemoryHandle)
    processes = [group.processes[peer] for peer in range(size)]
    return CollectiveSlots(SlotMemory.map(group.arena, processes, handles), rank)


def _publish_test_page(arena: Arena) -> tuple[SharedMemoryHandle | None, str]:
    """Write a test page; return its handle, or why shared memory cannot be allocated."""
    if not hasattr(os, "memfd_create"):
        return None, "this system has no memfd_create"
    try:
        block = arena.take(64)
    except OSError as error:
        return None, f"memfd_create: {error}"
    block.chunk.words(block.offset, 1)[0] = _MAGIC + os.getpid()
    return handle_of_block(block), ""


def _verify_test_pages(arena: Arena, pages: list[_MappingTestPage]) -> str:
    """Map and read the other ranks' test pages; return why that failed, or nothing."""
    for _, process, page in pages:
        if page is None:
            continue
        try:
            word = arena.open(process, page).words(page.offset, 1)[0]
        except (OSError, ValueError) as error:
            return f"process {process} is out of sight: {error}"
        if word != _MAGIC + process:
            return f"process {process} lives in another process namespace"
    return ""
