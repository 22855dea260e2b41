"""Lanes: memory through which a rank shows its tensors of one name and form to its neighbours.

A lane begins with lines of 64 bytes, read and written as 64-bit numbers::

    lines 0, 1    for the even and the odd steps: what is shown, where it lies, for whom
    lines 2 …     for each rank of the machine: what it has taken

and goes on with slots for pieces of the tensor, those of even and of odd steps apart, so that a
rank may show the next step while a neighbour still reads the last one. "Shown" and "taken" are a
step and a number of pieces in one word, which only ever grows and which only one rank writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from asyncddp.memory.shared import ORDERED, Arena, Place, View, fence, place_of

__all__ = ["MOST_RANKS", "Cut", "Lane", "SeenLane", "pieces_of", "step_of", "word"]

MOST_RANKS = 256
_PIECES_FROM = ((1 << 25, 1 << 20), (0, 1 << 19))
"""Bytes of a tensor, and of the pieces into which one that is larger is cut: what stays in a cache
between being written and being read, and not so little that Python's own time counts."""
_SLOTS = 4
_BITS = 24
_PIECES = (1 << _BITS) - 1
_LINE = 8  # words
_DESCRIPTOR, _SIZE, _OFFSET, _MASK = 1, 2, 3, 4  # places in a line, after the word itself
_MASK_WORDS = 4


def word(step: int, pieces: int) -> int:
    """So many pieces of a step, as one number; zero is before everything."""
    return (step + 1) << _BITS | pieces


def step_of(value: int) -> int:
    """The step of a word; -1 before everything."""
    return (value >> _BITS) - 1


def pieces_of(value: int) -> int:
    """The number of pieces in a word."""
    return value & _PIECES


@dataclass(frozen=True)
class Cut:
    """How tensors of one form are cut.

    Attributes:
        shape, dtype: The form.
        count: Elements of the tensor.
        step: Elements of a piece.
        pieces: How many pieces there are.
        slots: Pieces that a lane has room for at a time.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int
    step: int
    pieces: int
    slots: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Cut:
        """Cut a tensor into pieces that a cache holds."""
        count = math.prod(shape)
        size = next(piece for least, piece in _PIECES_FROM if count * dtype.itemsize >= least)
        step = max(1, min(count, size // dtype.itemsize))
        pieces = max(1, -(-count // step))
        return cls(shape, dtype, count, step, pieces, min(pieces, _SLOTS))

    @classmethod
    def whole(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Cut:
        """Leave a tensor in one piece."""
        count = math.prod(shape)
        return cls(shape, dtype, count, count, 1, 1)

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All pieces of a contiguous tensor."""
        return torch.split(tensor.view(-1), self.step)

    def piece(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """One piece of a flat tensor."""
        return flat if self.pieces == 1 else flat[number * self.step : (number + 1) * self.step]


class _Board:
    """A lane's memory, as its owner and its readers see it."""

    def __init__(self, view: View, offset: int, ranks: int, cut: Cut) -> None:
        self.cut = cut
        header = _LINE * (2 + ranks)
        self.words = view.words(offset, header)
        start, size = offset + 8 * header, cut.step * cut.dtype.itemsize
        self.slots = tuple(
            tuple(
                view.tensor(start + (half * cut.slots + slot) * size, (cut.step,), cut.dtype)
                for slot in range(cut.slots)
            )
            for half in (0, 1)
        )
        whole = cut.pieces == 1
        self.shaped = tuple(half[0].view(cut.shape) for half in self.slots) if whole else ()
        """The slots in the tensor's own shape, where one piece is all."""

    def slot(self, step: int, number: int) -> torch.Tensor:
        """Where a piece lies."""
        cut = self.cut
        slot = self.slots[step & 1][number % cut.slots]
        last = number == cut.pieces - 1 and cut.pieces > 1
        return slot[: cut.count - number * cut.step] if last else slot

    @staticmethod
    def nbytes(ranks: int, cut: Cut) -> int:
        """Bytes of a lane."""
        return 8 * _LINE * (2 + ranks) + 2 * cut.slots * cut.step * cut.dtype.itemsize


class Lane(_Board):
    """What this rank shows.

    Args:
        arena: Where its memory comes from.
        ranks: The ranks of the machine, in the order that all of them know.
        cut: How its tensors are cut.

    Raises:
        OSError: There is no more memory.
    """

    def __init__(self, arena: Arena, ranks: tuple[int, ...], cut: Cut) -> None:
        block = arena.take(self.nbytes(len(ranks), cut), zeroed=8 * _LINE * (2 + len(ranks)))
        self.place = place_of(block)
        super().__init__(block.chunk, block.offset, len(ranks), cut)
        self._ranks = {rank: place for place, rank in enumerate(ranks)}
        self.ranks = frozenset(ranks)
        self._readers: list[tuple[int, tuple[tuple[int, int], ...]]] = [(-1, ()), (-1, ())]
        self._masks: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = {}

    def free(self, step: int) -> bool:
        """Whether what was shown before in this step's slots has been taken by all."""
        earlier, readers = self._readers[step & 1]
        if not readers:
            return True
        done, words = word(earlier, self.cut.pieces), self.words
        return all([words[place] >= done for _, place in readers])

    def begin(self, step: int, targets: tuple[int, ...], place: Place | None = None) -> None:
        """Say for whom the pieces of a step are, and where they lie if not in the slots."""
        known = self._masks.get(targets)
        if known is None:
            known = self._masks[targets] = self._addressed(targets)
        mask, readers = known
        words, line = self.words, _LINE * (step & 1)
        words[line] = word(step, 0)  # before the rest, so that no reader mixes up two steps
        fence()
        words[line + _DESCRIPTOR] = 0
        if place is not None:
            words[line + _DESCRIPTOR] = place.descriptor + 1
            words[line + _SIZE], words[line + _OFFSET] = place.size, place.offset
        for index, bits in enumerate(mask):
            words[line + _MASK + index] = bits
        self._readers[step & 1] = step, readers

    def _addressed(
        self, targets: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        mask = [0] * (1 + max(self._ranks.values()) // 64)
        for target in targets:
            place = self._ranks[target]
            mask[place // 64] |= 1 << place % 64
        readers = tuple((target, _LINE * (2 + self._ranks[target])) for target in targets)
        return tuple(mask), readers

    def post(self, step: int, targets: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Show a tensor of one piece, if there is room: :meth:`free`, begin and show in one.

        Returns:
            Whether there was room.
        """
        words, half = self.words, step & 1
        earlier, readers = self._readers[half]
        for _, place in readers:
            if words[place] < (earlier + 1) << _BITS | 1:
                return False
        known = self._masks.get(targets)
        if known is None or known[1] is not readers or words[_LINE * half + _DESCRIPTOR]:
            self.begin(step, targets)
        else:
            self._readers[half] = step, readers
        self.shaped[half].copy_(tensor)
        if not ORDERED:
            fence()
        words[_LINE * half] = (step + 1) << _BITS | 1
        return True

    def show(self, step: int, pieces: int) -> None:
        """So many pieces of a step may be read."""
        fence()
        self.words[_LINE * (step & 1)] = word(step, pieces)

    def late(self, step: int, pieces: int) -> list[tuple[int, int]]:
        """Who has yet to take so many pieces, of the step or of an earlier one in its slots.

        Returns:
            Ranks, and the step that each has yet to take.
        """
        shown, readers = self._readers[step & 1]
        goal = word(shown, pieces if shown == step else self.cut.pieces)
        return [(rank, shown) for rank, place in readers if self.words[place] < goal]


class SeenLane(_Board):
    """What a neighbour shows, seen from this rank.

    Args:
        view: The neighbour's memory.
        offset: Where in it the lane begins.
        ranks: The ranks of the machine, in the order that all of them know.
        rank: This rank.
        cut: How its tensors are cut.
    """

    def __init__(
        self, view: View, offset: int, ranks: tuple[int, ...], rank: int, cut: Cut
    ) -> None:
        super().__init__(view, offset, len(ranks), cut)
        place = ranks.index(rank)
        self.mine = _LINE * (2 + place)
        self._mask, self._bit = _MASK + place // 64, 1 << place % 64
        self._elsewhere: dict[Place, torch.Tensor] = {}

    def whole(self, step: int) -> torch.Tensor | None:
        """A tensor of one piece in its own shape, if it is shown in the slots, and to this rank."""
        words, half = self.words, step & 1
        line = _LINE * half
        if words[line] != (step + 1) << _BITS | 1:
            return None
        if not ORDERED:
            fence()
        if not words[line + self._mask] & self._bit or words[line + _DESCRIPTOR]:
            return None
        return self.shaped[half] if words[line] == (step + 1) << _BITS | 1 else None

    def shown(self, step: int) -> int:
        """How many pieces of a step may be read."""
        value = self.words[_LINE * (step & 1)]
        fence()
        return pieces_of(value) if step_of(value) == step else 0

    def addressed(self, step: int) -> bool:
        """Whether a step that is shown is meant for this rank."""
        words, line = self.words, _LINE * (step & 1)
        meant = words[line + self._mask] & self._bit
        fence()
        return bool(meant) and step_of(words[line]) == step

    def place(self, step: int) -> Place | None:
        """Where the pieces of a step lie, if not in the slots."""
        line = _LINE * (step & 1)
        descriptor = self.words[line + _DESCRIPTOR]
        if not descriptor:
            return None
        return Place(descriptor - 1, self.words[line + _SIZE], self.words[line + _OFFSET])

    def take(self, step: int, pieces: int) -> None:
        """So many pieces of a step have been read."""
        if not ORDERED:
            fence()
        self.words[self.mine] = word(step, pieces)

    def untaken(self) -> Iterable[int]:
        """Steps of which something is meant for this rank that it has not taken."""
        for half in (0, 1):
            value = self.words[_LINE * half]
            fence()
            step = step_of(value)
            if pieces_of(value) and self.addressed(step) and self.words[self.mine] < value:
                yield step
