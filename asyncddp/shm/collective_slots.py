"""Collective slots: shared memory where each rank posts its input of a collective to all.

Each rank has some slots, used in turns, so that a collective is one pass: write, wait until all
have written, read. Along with its data a rank writes a digest of its call; if digests differ,
ranks have called different collectives, or some cannot use the slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from copy import copy

import torch

from asyncddp.shm.arena import Arena, MappedChunk, SharedMemoryHandle, handle_of_block, store_fence
from asyncddp.torch_modes import normal_mode

_CAPACITY = 1 << 20  # bytes that one rank can give at most
_SHARED_CAPACITY = 1 << 21  # bytes that all ranks give together at most: each of them reads all
SLOTS = 4  # of a rank, used in turns
_LINE = 8  # words of a cache line
_HEADER_BYTES = 8 * _LINE * (1 + SLOTS)
_STEP, _DIGEST, _BYTES = 0, 1, 2  # words of a slot's line; the first line counts what was read
_REMEMBERED = 64  # views of slots that are kept

DIFFERENT = 0
"""Digest that is equal to that of no call."""


class SlotMemory:
    """Shared memory to which all ranks post their inputs of collectives, mapped into this process.

    Attributes:
        capacity: Bytes of data that a slot holds.
    """

    def __init__(self, places: Sequence[tuple[MappedChunk, int]]) -> None:
        self.capacity = self.bytes_of_slot(len(places))
        shape = SLOTS, self.capacity
        self.words = [chunk.words(offset, _HEADER_BYTES // 8) for chunk, offset in places]
        self.data = [
            chunk.tensor(offset + _HEADER_BYTES, shape, torch.uint8) for chunk, offset in places
        ]

    @staticmethod
    def bytes_of_slot(ranks: int) -> int:
        """Return the capacity of a slot in bytes, for a number of ranks."""
        return max(64, min(_CAPACITY, _SHARED_CAPACITY // ranks) // 64 * 64)

    @classmethod
    def allocate(cls, arena: Arena, ranks: int) -> SharedMemoryHandle:
        """Allocate this rank's slots, for a number of ranks."""
        size = _HEADER_BYTES + SLOTS * cls.bytes_of_slot(ranks)
        return handle_of_block(arena.take(size, zeroed=_HEADER_BYTES))

    @classmethod
    def map(
        cls, arena: Arena, processes: Sequence[int], handles: Sequence[SharedMemoryHandle]
    ) -> SlotMemory:
        """Map the slots of all ranks, given their process ids and handles."""
        pairs = zip(processes, handles, strict=True)
        return cls([(arena.open(process, handle), handle.offset) for process, handle in pairs])

    def of(self, places: Sequence[int]) -> SlotMemory:
        """Return the memory of some of the ranks, given their places."""
        chosen = copy(self)
        chosen.words = [self.words[place] for place in places]
        chosen.data = [self.data[place] for place in places]
        return chosen


class CollectiveSlots:
    """Shared memory of collectives, as one rank uses it: post the input, wait, read all inputs.

    All ranks number their collectives alike, by steps from 0 on. In step s a rank calls
    :meth:`post` once :meth:`has_room` is true, :meth:`read` once :meth:`all_posted` is true, and
    then :meth:`finish`.

    Attributes:
        ranks: World rank of each slot's owner, used in lists of ranks.
        first: Step of the first collective, to which the number of a later one is added.

    Example:
        >>> from asyncddp.shm.arena import InProcessArena
        >>> arena = InProcessArena()
        >>> handles = [SlotMemory.allocate(arena, ranks=2) for _ in range(2)]
        >>> memory = SlotMemory.map(arena, [0, 0], handles)
        >>> one, two = (CollectiveSlots(memory, rank) for rank in range(2))
        >>> one.post(0, 7, torch.tensor([1.0]))
        >>> one.late(0), two.post(0, 7, torch.tensor([2.0])), one.late(0)
        ([1], None, [])
        >>> one.agree(0, 7), one.read(0, torch.float32)
        (True, [tensor([1.]), tensor([2.])])
    """

    def __init__(
        self, memory: SlotMemory, rank: int, ranks: Sequence[int] | None = None, first: int = 0
    ) -> None:
        self._memory, self._rank, self.first = memory, rank, first
        self._words, self._data, self.capacity = memory.words, memory.data, memory.capacity
        self.ranks = range(len(self._words)) if ranks is None else ranks
        self._own = self._words[rank]
        self._own[0] = first
        self._others = [words for words in self._words if words is not self._own]
        self._addresses = [self._data[rank][slot].data_ptr() for slot in range(SLOTS)]
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._read_by_all = 0  # steps, as far as is known

    def among(self, members: Collection[int], ended: int) -> CollectiveSlots:
        """Return the slots of some ranks, who all call this after ``ended`` collectives.

        What was posted before, also to collectives that have not ended, counts no more. A rank
        posts nothing to the new slots until all have called this.
        """
        places = [place for place, rank in enumerate(self.ranks) if rank in members]
        ranks = [self.ranks[place] for place in places]
        first = self.first + ended + 2 * SLOTS  # above all steps that anybody may have posted to
        return CollectiveSlots(self._memory.of(places), places.index(self._rank), ranks, first)

    def has_room(self, step: int) -> bool:
        """Return whether the slot of a step is free: all ranks have read its earlier contents."""
        needed = step - SLOTS + 1
        if self._read_by_all < needed:
            self._read_by_all = min(words[0] for words in self._words)
            store_fence()
        return self._read_by_all >= needed

    def unread(self, step: int) -> list[int]:
        """Return the ranks that have not read the earlier contents of a step's slot yet."""
        needed, pairs = step - SLOTS + 1, zip(self.ranks, self._words, strict=True)
        return [rank for rank, words in pairs if words[0] < needed]

    def post(self, step: int, digest: int, data: torch.Tensor | None = None) -> None:
        """Write this rank's digest and contiguous CPU data for a step, unless already written."""
        line = _LINE * (1 + step % SLOTS)
        words = self._own
        if words[line + _STEP] == step + 1:
            return
        size = 0
        if data is not None and (size := data.nbytes):
            ctypes.memmove(self._addresses[step % SLOTS], data.data_ptr(), size)
        words[line + _BYTES], words[line + _DIGEST] = size, digest
        store_fence()
        words[line + _STEP] = step + 1

    def withdraw(self, step: int) -> None:
        """Overwrite the posted digest by one that differs from all, to make the step disagree."""
        self._own[_LINE * (1 + step % SLOTS) + _DIGEST] = DIFFERENT

    def all_posted(self, step: int) -> bool:
        """Return whether all ranks have posted to a step."""
        line, number = _LINE * (1 + step % SLOTS), step + 1
        for words in self._others:
            if words[line] != number:
                return False
        store_fence()
        return self._own[line] == number

    def late(self, step: int) -> list[int]:
        """Return the ranks that have not posted to a step."""
        line, number = _LINE * (1 + step % SLOTS), step + 1
        pairs = zip(self.ranks, self._words, strict=True)
        return [rank for rank, words in pairs if words[line] != number]

    def joined(self, step: int) -> list[int]:
        """Return the other ranks that have posted to a step."""
        line, number = _LINE * (1 + step % SLOTS), step + 1
        every = zip(self.ranks, self._words, strict=True)
        return [rank for rank, words in every if words[line] == number and words is not self._own]

    def differs(self, step: int, digest: int) -> bool:
        """Return whether any rank that has posted to a step has posted a different digest."""
        line, number = _LINE * (1 + step % SLOTS), step + 1
        return any(
            words[line + _DIGEST] != digest for words in self._words if words[line] == number
        )

    def agree(self, step: int, digest: int) -> bool:
        """Return whether all ranks have posted this digest; valid once :meth:`all_posted`."""
        line = _LINE * (1 + step % SLOTS) + _DIGEST
        for words in self._words:
            if words[line] != digest:
                return False
        return digest != DIFFERENT

    def read(
        self, step: int, dtype: torch.dtype, shape: tuple[int, ...] = (-1,)
    ) -> list[torch.Tensor]:
        """Return the data that all ranks have posted to a step: views, valid until :meth:`finish`.

        Each view has this shape, in which one size may be -1; empty data are flat.
        """
        slot = step % SLOTS
        line = _LINE * (1 + slot) + _BYTES
        sizes = tuple([words[line] for words in self._words])
        key = slot, dtype, shape, sizes
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _REMEMBERED:
                self._views.clear()
            pairs = zip(self._data, sizes, strict=True)
            with normal_mode():
                flat = [data[slot, :size].view(dtype) for data, size in pairs]
                views = [one.view(shape) if one.numel() or 0 in shape else one for one in flat]
            self._views[key] = views
        return views

    def finish(self, step: int) -> None:
        """Mark the data of a step as read by this rank."""
        store_fence()
        self._own[0] = step + 1
