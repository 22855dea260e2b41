"""Slots in shared memory in which ranks write what they give to a collective, and read the others'.

Each rank has some slots, used in turns, so that a collective is one pass: write, wait until all have
written, read. With its data a rank writes a digest of what it calls; where the digests differ, ranks
have called different collectives, or some cannot use the slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from asyncddp.shm.arena import Arena, MappedChunk, SharedMemoryHandle, handle_of_block, store_fence
from asyncddp.torch_modes import normal_mode

CAPACITY = 1 << 16
"""Bytes that one rank can give at most."""
_SHARED_CAPACITY = 1 << 18  # bytes that all ranks give together at most: each of them reads all
_SLOTS = 4
_LINE = 8  # words of a cache line
_HEADER_BYTES = 8 * _LINE * (1 + _SLOTS)
_TOTAL_BYTES = _HEADER_BYTES + _SLOTS * CAPACITY
_STEP, _DIGEST, _BYTES = 0, 1, 2  # words of a slot's line; the first line counts what was read
_REMEMBERED = 64  # views of slots that are kept

DIFFERENT = 0
"""Digest that agrees with none."""


class CollectiveSlots:
    """Slots of all ranks of a communicator, which number their collectives alike, from 0 on.

    A rank writes to step s with :meth:`post` once :meth:`has_room` says that the ranks have read
    what was in the slot, may read once :meth:`late` is empty, and then calls :meth:`finish`.

    Args:
        rank: This rank.
        places: Each rank's memory of ``_TOTAL_BYTES``, by rank, and where it begins.

    Example:
        >>> from asyncddp.shm.arena import InProcessArena
        >>> arena = InProcessArena()
        >>> handles = [CollectiveSlots.allocate(arena) for _ in range(2)]
        >>> one, two = (CollectiveSlots.open(arena, [0, 0], rank, handles) for rank in range(2))
        >>> one.post(0, 7, torch.tensor([1.0]))
        >>> one.late(0), two.post(0, 7, torch.tensor([2.0])), one.late(0)
        ([1], None, [])
        >>> one.agree(0, 7), one.read(0, torch.float32)
        (True, [tensor([1.]), tensor([2.])])
    """

    def __init__(self, rank: int, places: Sequence[tuple[MappedChunk, int]]) -> None:
        self._words = [chunk.words(offset, _HEADER_BYTES // 8) for chunk, offset in places]
        self._data = [
            chunk.tensor(offset + _HEADER_BYTES, (_SLOTS, CAPACITY), torch.uint8)
            for chunk, offset in places
        ]
        self._own, self._rank = self._words[rank], rank
        self._addresses = [self._data[rank][slot].data_ptr() for slot in range(_SLOTS)]
        self._others = [(peer, words) for peer, words in enumerate(self._words) if peer != rank]
        self._views: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._read_by_all = 0  # steps, as far as is known
        self.capacity = min(CAPACITY, _SHARED_CAPACITY // len(places))

    @staticmethod
    def allocate(arena: Arena) -> SharedMemoryHandle:
        """Allocate this rank's slots."""
        return handle_of_block(arena.take(_TOTAL_BYTES, zeroed=_HEADER_BYTES))

    @classmethod
    def open(
        cls,
        arena: Arena,
        processes: Sequence[int],
        rank: int,
        handles: Sequence[SharedMemoryHandle],
    ) -> CollectiveSlots:
        """Map all ranks' slots, given their processes and handles."""
        places = [
            (arena.open(process, handle), handle.offset)
            for process, handle in zip(processes, handles, strict=True)
        ]
        return cls(rank, places)

    def has_room(self, step: int) -> bool:
        """Tell whether all ranks have read what was in the slot of a step."""
        needed = step - _SLOTS + 1
        if self._read_by_all < needed:
            self._read_by_all = min(words[0] for words in self._words)
            store_fence()
        return self._read_by_all >= needed

    @staticmethod
    def step_before(step: int) -> int:
        """Return the step that had a step's slot before."""
        return step - _SLOTS

    def unread(self, step: int) -> list[int]:
        """Return the ranks that have yet to read what was in the slot of a step."""
        return [rank for rank, words in enumerate(self._words) if words[0] < step - _SLOTS + 1]

    def post(self, step: int, digest: int, data: torch.Tensor | None = None) -> None:
        """Write digest and data, contiguous on the host, for a step; a second call does nothing."""
        line = _LINE * (1 + step % _SLOTS)
        words = self._own
        if words[line + _STEP] == step + 1:
            return
        size = 0
        if data is not None and (size := data.nbytes):
            ctypes.memmove(self._addresses[step % _SLOTS], data.data_ptr(), size)
        words[line + _BYTES], words[line + _DIGEST] = size, digest
        store_fence()
        words[line + _STEP] = step + 1

    def withdraw(self, step: int) -> None:
        """Let what was posted agree with none, for ranks that have not read it yet."""
        self._own[_LINE * (1 + step % _SLOTS) + _DIGEST] = DIFFERENT

    def all_posted(self, step: int) -> bool:
        """Tell whether all other ranks have posted to a step."""
        line, number = _LINE * (1 + step % _SLOTS), step + 1
        for _, words in self._others:
            if words[line] != number:
                return False
        store_fence()
        return True

    def late(self, step: int) -> list[int]:
        """Return the ranks that have not posted to a step."""
        line, number = _LINE * (1 + step % _SLOTS), step + 1
        return [peer for peer, words in self._others if words[line] != number]

    def differs(self, step: int, digest: int) -> bool:
        """Tell whether a rank has posted another digest to a step; not all need have posted."""
        line, number = _LINE * (1 + step % _SLOTS), step + 1
        return any(
            words[line + _DIGEST] != digest for words in self._words if words[line] == number
        )

    def agree(self, step: int, digest: int) -> bool:
        """Tell whether all ranks have posted this digest, once they have posted."""
        line = _LINE * (1 + step % _SLOTS) + _DIGEST
        return digest != DIFFERENT and all(words[line] == digest for words in self._words)

    def read(self, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return what all ranks have posted to a step, as flat views, valid until :meth:`finish`."""
        slot = step % _SLOTS
        line = _LINE * (1 + slot) + _BYTES
        sizes = tuple([words[line] for words in self._words])
        key = slot, dtype, sizes
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _REMEMBERED:
                self._views.clear()
            pairs = zip(self._data, sizes, strict=True)
            with normal_mode():
                views = [data[slot, :size].view(dtype) for data, size in pairs]
            self._views[key] = views
        return views

    def finish(self, step: int) -> None:
        """Say that this rank reads no more of a step."""
        store_fence()
        self._own[0] = step + 1


def slots_for(
    arena: Arena,
    processes: Sequence[int],
    rank: int,
    gather: Callable[[SharedMemoryHandle], Sequence[SharedMemoryHandle]],
) -> CollectiveSlots:
    """Allocate and map the slots of the ranks that ``gather`` asks; collective among them."""
    return CollectiveSlots.open(arena, processes, rank, gather(CollectiveSlots.allocate(arena)))
