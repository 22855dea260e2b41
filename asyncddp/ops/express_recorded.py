"""The short way of an average, as it is noted in the timeline; taken in place of the plain one."""

from __future__ import annotations

import time
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

    _shown = True  # by the recorder

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
        known = waiting.mixes
        try:
            found = super().take(step, row, own, out, shown)
            seen = self._seen(row)
            if waiting.mixes == known and seen is not None and seen.read[0] == step:
                self._note_mix(row, *seen.read[1:], self._channel.cut.count)
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
        step, cut = self._channel.flight[0], self._channel.cut
        waiting = self._recorder.waiting(self._verb, self._name, row.sources)
        try:
            moved = super()._moved(swap, row, own, out)
            seen = self._seen(row)
            if seen is not None and moved:
                self._note_mix(row, *seen.read[1:], cut.count)
            elif seen is not None and swap.taken:
                now = time.monotonic_ns()
                self._note_mix(row, seen.begun(step), now, swap.taken * cut.step)
            return moved
        finally:
            waiting.end()

    def _seen(self, row: Mixing) -> RecordedSeenLane | None:
        """The lane of the only neighbour that is mixed with."""
        seen = self._channel.seen.get(row.sources[0]) if row.sources else None
        return seen if isinstance(seen, RecordedSeenLane) else None

    def _note_mix(self, row: Mixing, begun: int, over: int, count: int) -> None:
        """Note the average of so many elements that were read and mixed in one go."""
        nbytes = count * self._channel.cut.dtype.itemsize
        self._recorder.mixed(self._verb, self._name, begun, over, nbytes, row.sources)
