"""What the engine notes in the timeline; made in place of the plain parts where there is one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from asyncddp.engine.lanes import Cut, Lane, SeenLane
from asyncddp.engine.posting import Posting
from asyncddp.memory.shared import Arena, Place, View
from asyncddp.timeline.notes import Span
from asyncddp.timeline.ranges import Range
from asyncddp.timeline.recorder import Recorder
from asyncddp.timeline.tracks import LANE
from asyncddp.transport.contract import Transfer

if TYPE_CHECKING:
    from asyncddp.engine.operation import Operation

__all__ = [
    "Awaited",
    "RecordedLane",
    "RecordedSeenLane",
    "RecordedTransfer",
    "call_of",
    "note_collective",
    "noted",
]


class RecordedTransfer:
    """A transfer whose end is noted.

    Args:
        transfer: The transfer.
        note: Called once, when it has ended well.
    """

    def __init__(self, transfer: Transfer, note: Callable[[], None]) -> None:
        self._transfer = transfer
        self._note: Callable[[], None] | None = note

    def done(self) -> bool:
        """Whether it has ended."""
        ended = self._transfer.done()
        if ended and self._note is not None:
            note, self._note = self._note, None
            note()
        return ended

    def abandon(self) -> None:
        """Give up waiting for it."""
        self._note = None
        self._transfer.abandon()


class RecordedLane(Lane):
    """A lane that notes what was shown, and to whom.

    Args:
        recorder: Takes the notes.
        verb: Whose lane.
        name: Under which name.
        arena: As of every lane, as is what follows.
        ranks: The ranks of the machine.
        cut: How its tensors are cut.
    """

    def __init__(
        self,
        recorder: Recorder,
        verb: str,
        name: str,
        arena: Arena,
        ranks: tuple[int, ...],
        cut: Cut,
    ) -> None:
        super().__init__(arena, ranks, cut)
        self._recorder, self._verb, self._name = recorder, verb, name
        self._nbytes = cut.count * cut.dtype.itemsize
        self._begun: dict[int, tuple[int, tuple[int, ...]]] = {}

    def begin(self, step: int, targets: tuple[int, ...], place: Place | None = None) -> None:
        """Say for whom the pieces of a step are."""
        self._begun[step & 1] = time.monotonic_ns(), targets
        super().begin(step, targets, place)

    def post(self, step: int, targets: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Show a tensor of one piece, if there is room."""
        begun = time.monotonic_ns()
        posted = super().post(step, targets, tensor)
        if posted:
            self._begun[step & 1] = begun, targets
            self._note(step)
        return posted

    def show(self, step: int, pieces: int) -> None:
        """So many pieces of a step may be read."""
        super().show(step, pieces)
        if pieces == self.cut.pieces:
            self._note(step)

    def _note(self, step: int) -> None:
        begun, targets = self._begun[step & 1]
        now = time.monotonic_ns()
        for target in targets:
            self._recorder.transfer(
                "send", self._verb, self._name, target, self._nbytes, begun, now, step
            )


class RecordedSeenLane(SeenLane):
    """A neighbour's lane, of which is noted when it was read.

    Args:
        recorder: Takes the notes.
        peer: The neighbour.
        verb: Whose lane.
        name: Under which name.
        view: As of every lane, as is what follows.
        offset: Where in it the lane begins.
        ranks: The ranks of the machine.
        rank: This rank.
        cut: How its tensors are cut.

    Attributes:
        read: The step that was read last, when that began, and when it was over.
    """

    def __init__(
        self,
        recorder: Recorder,
        peer: int,
        verb: str,
        name: str,
        view: View,
        offset: int,
        ranks: tuple[int, ...],
        rank: int,
        cut: Cut,
    ) -> None:
        super().__init__(view, offset, ranks, rank, cut)
        self._recorder, self._peer, self._verb, self._name = recorder, peer, verb, name
        self._nbytes = cut.count * cut.dtype.itemsize
        self._begun: dict[int, int] = {}
        self.read = (-1, 0, 0)

    def whole(self, step: int) -> torch.Tensor | None:
        """A tensor of one piece, if it is shown."""
        found = super().whole(step)
        if found is not None:
            self._begun.setdefault(step, time.monotonic_ns())
        return found

    def place(self, step: int) -> Place | None:
        """Where the pieces of a step lie; whoever asks begins to read."""
        self._begun.setdefault(step, time.monotonic_ns())
        return super().place(step)

    def begun(self, step: int) -> int:
        """When the reading of a step began that is not over yet; now, if it has not."""
        return self._begun.get(step, time.monotonic_ns())

    def take(self, step: int, pieces: int) -> None:
        """So many pieces of a step have been read."""
        over = pieces == self.cut.pieces
        begun = self._begun.pop(step, None) if over else None
        if begun is not None and self.shown(step) == pieces:  # a neighbour that fails shows less
            now = time.monotonic_ns()
            self.read = step, begun, now
            self._recorder.transfer(
                "read", self._verb, self._name, self._peer, self._nbytes, begun, now, step
            )
        super().take(step, pieces)


class Awaited:
    """Notes what a thread waits for while it drives an operation.

    Args:
        recorder: Takes the notes.
        operation: What it waits for.
        progress: Makes a round of progress.
    """

    def __init__(
        self, recorder: Recorder, operation: Operation[Any], progress: Callable[[], bool]
    ) -> None:
        program = operation.program
        self._operation, self._progress = operation, progress
        self._waiting = recorder.waiting(program.verb, program.label)

    def progress(self) -> bool:
        """Make a round of progress; whether anything moved."""
        moved = self._progress()
        if not moved:
            self._waiting.late([peer for peer, _ in self._operation.missing()])
        return moved

    def end(self) -> None:
        """It waits no more."""
        self._waiting.end()


def noted(
    recorder: Recorder,
    kind: str,
    posting: Posting,
    peer: int,
    nbytes: int,
    begun: int,
    transfer: Transfer | None,
) -> Transfer | None:
    """Note a message of an exchange: now, or when its transfer has ended."""
    (name, step), verb = posting.key, posting.form.verb

    def note() -> None:
        """Note the transfer, which has ended."""
        recorder.transfer(kind, verb, name, peer, nbytes, begun, time.monotonic_ns(), step)

    if transfer is not None:
        return RecordedTransfer(transfer, note)
    note()
    return None


def note_collective(recorder: Recorder, posting: Posting, ranks: int, begun: int) -> None:
    """Note a collective that has just ended."""
    form = posting.form
    sizes = [size for size in form.shape if size is not None]
    nbytes = math.prod(sizes) * getattr(torch, form.dtype).itemsize
    verb = form.verb.partition("(")[0].partition(" ")[0]
    args = {"verb": verb, "name": posting.key.name, "bytes": nbytes, "ranks": ranks}
    recorder.take(Span("collective", "collective", LANE, begun, time.monotonic_ns(), args))


def call_of(
    recorder: Recorder | None, verb: str, name: str, about: Sequence[object]
) -> AbstractContextManager[object]:
    """What happens inside is the call of a verb, for the timeline or for torch's profiler alone.

    Args:
        recorder: Of the timeline, if there is one.
        verb: The verb.
        name: Under which name.
        about: What it was called with.
    """
    if recorder is None:
        return Range(f"ENQUEUE_{verb.upper()}")
    nbytes = next((one.nbytes for one in about if isinstance(one, torch.Tensor)), 0)
    return recorder.enqueued(verb, name, nbytes)
