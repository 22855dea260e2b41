"""The short way of an average, as it is noted in the timeline; taken in place of the plain one."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.engine import Handle
from asyncddp.engine.channels import Channel
from asyncddp.engine.recorded import RecordedSeenLane
from asyncddp.engine.swap import Swap
from asyncddp.ops.express import Express
from asyncddp.ops.mixing import Mixing
from asyncddp.timeline.recorder import Recorder

__all__ = ["RecordedExpress"]


class RecordedExpress(Express):
    """The short way of one verb, and notes of its calls, waits and averages.

    Args:
        recorder: Takes the notes.
        context: As of :class:`Express`, as is what follows.
        verb: The verb.
        name: The name.
        channel: What was exchanged before.
    """

    def __init__(
        self, recorder: Recorder, context: Context, verb: str, name: str, channel: Channel
    ) -> None:
        super().__init__(context, verb, name, channel)
        self._recorder = recorder

    def run(
        self, row: Mixing, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Average a tensor, or do nothing and give None."""
        if not self.open(row):
            return None
        with self._recorder.enqueued(self._verb, self._name, tensor.nbytes) as call:
            result = super().run(row, tensor, out)
            if result is None:
                call.forget()
            return result

    def start(
        self, row: Mixing, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor] | None:
        """Show a tensor, or do nothing and give None."""
        with self._recorder.enqueued(self._verb, self._name, tensor.nbytes) as call:
            handle = super().start(row, tensor, out)
            if handle is None:
                call.forget()
            return handle

    def take(
        self, step: int, row: Mixing, own: torch.Tensor, out: torch.Tensor | None, shown: int
    ) -> torch.Tensor | Handle[torch.Tensor]:
        """Average a tensor of one piece that was shown, or leave it to the engine."""
        waiting = self._recorder.waiting(self._verb, self._name, row.sources)
        try:
            found = super().take(step, row, own, out, shown)
            self._note_read(step, row)
            return found
        finally:
            waiting.end()

    def _streamed(self, *args: Any, **kwargs: Any) -> torch.Tensor | Handle[torch.Tensor]:
        row: Mixing = args[1]
        waiting = self._recorder.waiting(self._verb, self._name, row.sources)
        try:
            return super()._streamed(*args, **kwargs)
        finally:
            waiting.end()

    def _moved(self, swap: Swap, row: Mixing, own: torch.Tensor, out: torch.Tensor) -> bool:
        waiting = self._recorder.waiting(self._verb, self._name, row.sources)
        try:
            moved = super()._moved(swap, row, own, out)
            if moved:
                self._note_read(self._channel.flight[0], row)
            return moved
        finally:
            waiting.end()

    def _note_read(self, step: int, row: Mixing) -> None:
        """Note the average of what was just read and mixed in one go, if it was."""
        seen = self._channel.seen.get(row.sources[0]) if row.swaps else None
        if isinstance(seen, RecordedSeenLane) and seen.read[0] == step and not seen.noted:
            _, begun, over = seen.read
            seen.noted = True
            self._recorder.mixed(self._verb, self._name, begun, over, self._nbytes, row.sources)

    @property
    def _nbytes(self) -> int:
        cut = self._channel.cut
        return cut.count * cut.dtype.itemsize
