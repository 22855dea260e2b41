"""A window that notes in the timeline what is put, got and mixed; made where there is one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from asyncddp.timeline.recorder import Recorder
from asyncddp.windows.contract import Buffer, Shown
from asyncddp.windows.handle import WindowHandle
from asyncddp.windows.side import Version
from asyncddp.windows.window import Window

__all__ = ["RecordedWindow"]


class RecordedWindow(Window):
    """A window of which is noted what it sends and reads.

    A message has the number of the version that its writer published; what a later version has
    replaced before it was read has no end.

    Args:
        recorder: Takes the notes.
        *args: As of every window.
        **kwargs: As of every window.
    """

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder
        self._nbytes = self.tensor.nbytes
        self._read: dict[int, int] = {}

    def _number_of(self, version: int) -> str:
        """What a message is called, unlike those of verbs and of other windows of the name."""
        return f"w{self.number}.{version}"

    def _note(self, verb: str, begun: int, peers: Iterable[int], **facts: Any) -> int:
        now, name = time.monotonic_ns(), verb.upper()
        args = {"name": self.name, "bytes": self._nbytes, "peers": list(peers), **facts}
        bluefog = {"op": f"MPI_{name}", "call": f"ENQUEUE_{name}"}  # what its scripts look for
        self._recorder.span("window", name, begun, now, {**args, **bluefog})
        return now

    def put(
        self,
        tensor: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        add: bool,
        with_p: bool,
        step: int | None = None,
    ) -> WindowHandle:
        """Publish a tensor to neighbours, then scale it."""
        verb, begun = "win_accumulate" if add else "win_put", time.monotonic_ns()
        with self._recorder.shown(verb.upper()):
            handle = super().put(tensor, self_weight, weights, add=add, with_p=with_p, step=step)
        self._note(verb, begun, weights)
        return handle

    def _sent(
        self, buffer: Buffer, weights: Mapping[int, float], clock: int, p: float, *, add: bool
    ) -> list[Version]:
        begun, verb = time.monotonic_ns(), "win_accumulate" if add else "win_put"
        versions = super()._sent(buffer, weights, clock, p, add=add)
        now = time.monotonic_ns()
        for peer in weights:
            edge = self.edges.outgoing.get(peer)
            if edge is not None:
                number = self._number_of(edge.published)
                facts = verb, self.name, peer, self._nbytes
                self._recorder.transfer("send", *facts, begun, now, number)
        return versions

    def lay_down(self, source: int, shown: Shown, weight: float) -> None:
        """Put what was got of a neighbour in place of what lies in its buffer; p stays."""
        begun = time.monotonic_ns()
        super().lay_down(source, shown, weight)
        self._note("win_get", begun, [source])
        self._read[source] = self._buffers.last_read(source)

    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool,
        clone: bool,
        with_p: bool,
    ) -> torch.Tensor:
        """Form the weighted sum over buffers."""
        begun = time.monotonic_ns()
        with self._recorder.shown("WIN_UPDATE"):
            result = super().update(self_weight, weights, reset=reset, clone=clone, with_p=with_p)
        old = self.staleness()
        behind = {str(source): old[source].steps for source in weights}
        now = self._note("win_update", begun, weights, staleness=behind)
        for source in weights:
            version = self._buffers.last_read(source)
            if version > self._read.get(source, 0):
                self._read[source] = version
                facts = "win_update", self.name, source, self._nbytes
                number = self._number_of(version)
                self._recorder.transfer("read", *facts, begun, now, number)
        return result
