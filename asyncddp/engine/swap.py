"""Mixing with one neighbour through lanes, as fast as Python can, while both come along."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from asyncddp.engine.lanes import Lane, SeenLane, pieces_of, word
from asyncddp.memory.shared import Place, fence

__all__ = ["Swap", "soon"]

_PATIENCE = 0.0002  # seconds for a neighbour to come
_LONGER = 0.005  # seconds for one that is here to do its next piece
_LOOKS = 50  # between two looks at the clock
Pause = Callable[[], None]


def soon(check: Callable[[], bool], pause: Pause | None, patience: float = _PATIENCE) -> bool:
    """Look for something for a moment; whether it has come."""
    limit = 0.0
    while True:
        for _ in range(_LOOKS):
            if check():
                return True
            if pause is not None:
                pause()
        now = time.perf_counter()
        if limit and now > limit:
            return False
        limit = limit or now + patience


def _reaches(words: memoryview, place: int, goal: int, pause: Pause | None) -> bool:
    """Look for a moment whether a word reaches a goal; longer for a piece that is not the first."""
    patience = _LONGER if pieces_of(goal) > 1 else _PATIENCE
    return words[place] >= goal or soon(lambda: words[place] >= goal, pause, patience)


class Swap:
    r"""One step between two lanes: :math:`y = x + w (x_\mathrm{peer} - x)`, piece by piece.

    Args:
        lane: What this rank shows, or None where nobody reads it.
        seen: What the neighbour shows.
        step: The step.
        targets: Who reads our lane.
        pause: Called between two looks, where there are fewer cores than ranks.

    Attributes:
        shown, taken: Pieces of ours that are shown, and of the neighbour's that were mixed.
    """

    def __init__(
        self,
        lane: Lane | None,
        seen: SeenLane,
        step: int,
        targets: tuple[int, ...],
        pause: Pause | None,
    ) -> None:
        self._lane, self._seen, self._step = lane, seen, step
        self._targets, self._pause = targets, pause
        self.shown = self.taken = 0

    def begin(self, place: Place | None) -> bool:
        """Announce our tensor.

        Args:
            place: Where it is read, if not in the slots.

        Returns:
            Whether there was room.
        """
        lane, step = self._lane, self._step
        if lane is None:
            return True
        if not lane.free(step) and not soon(lambda: lane.free(step), self._pause):
            return False
        lane.begin(step, self._targets, place)
        if place is not None:
            self.shown = lane.cut.pieces
            lane.show(step, self.shown)
        return True

    def others_place(self) -> Place | None:
        """Where the neighbour's tensor is read, if it comes soon and not through its slots."""
        if _reaches(self._seen.words, 8 * (self._step & 1), word(self._step, 1), self._pause):
            fence()
            if self._seen.addressed(self._step):
                return self._seen.place(self._step)
        return None

    def whole(
        self, own: torch.Tensor, other: torch.Tensor, out: torch.Tensor, weight: float
    ) -> bool:
        """Mix two tensors where they lie into a third one.

        Args:
            own: Our tensor, flat.
            other: The neighbour's.
            out: Where the average goes, which is neither.
            weight: :math:`w`.

        Returns:
            Whether our tensor may be changed by now.
        """
        pieces = self._seen.cut.pieces
        torch.lerp(own, other, weight, out=out)
        self._seen.take(self._step, pieces)
        self.taken = pieces
        return self._read_by_all(pieces)

    def _read_by_all(self, pieces: int) -> bool:
        """Whether so many of our pieces have been taken soon."""
        lane, step = self._lane, self._step
        if lane is None or not lane.late(step, pieces):
            return True
        return soon(lambda: not lane.late(step, pieces), self._pause, _LONGER)

    def staged(
        self, own: Sequence[torch.Tensor], out: Sequence[torch.Tensor], weight: float
    ) -> bool:
        """Copy our pieces into the slots, and mix the neighbour's out of its slots.

        Args:
            own: Our pieces.
            out: Where the average of each goes, which may be its own place.
            weight: :math:`w`.

        Returns:
            Whether all is done; if not, ``shown`` and ``taken`` say how far it has come.
        """
        lane, seen, pause, number = self._lane, self._seen, self._pause, len(own)
        line, base = 8 * (self._step & 1), word(self._step, 0)
        ahead = 1
        for taken in range(number):
            while self.shown < number and self.shown <= taken + ahead:
                if lane is not None and not self._show(lane, own[self.shown]):
                    if self.shown <= taken:
                        return False
                    break
                self.shown += 1
            if not _reaches(seen.words, line, base | taken + 1, pause):
                return False
            fence()
            if taken == 0 and not self._meant():
                return False
            other = seen.slot(self._step, taken)
            torch.lerp(own[taken], other, weight, out=out[taken])
            seen.take(self._step, taken + 1)
            self.taken = taken + 1
        return True

    def _meant(self) -> bool:
        """Whether what the neighbour shows is this step, for us, and in its slots."""
        seen, step = self._seen, self._step
        return seen.shown(step) > 0 and seen.addressed(step) and seen.place(step) is None

    def _show(self, lane: Lane, piece: torch.Tensor) -> bool:
        """Copy one more piece into its slot, if that is free."""
        number = self.shown
        if number >= lane.cut.slots:
            goal = number - lane.cut.slots + 1
            if lane.late(self._step, goal) and not soon(
                lambda: not lane.late(self._step, goal), self._pause, _LONGER
            ):
                return False
        lane.slot(self._step, number).copy_(piece)
        lane.show(self._step, number + 1)
        return True
