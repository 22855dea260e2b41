"""Handles of non-blocking averages, which compute the average when polled or waited for."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol, TypeAlias

import torch

from asyncddp.engine import Handle
from asyncddp.engine.messages import MatchKey
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.torch_modes import uncompiled

SentAverage: TypeAlias = tuple[int, WeightRow, torch.Tensor, torch.Tensor | None, int]
"""Step, weights, tensor, tensor for the result or None, and how many chunks have been sent."""


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached from autograd."""
    return tensor.detach() if tensor.requires_grad else tensor


class AveragingPath(Protocol):
    """Interface of a fast path that sends and completes repeated averages with one name."""

    channel: PersistentChannel
    verb: str
    name: str
    use: tuple[str, str, deque[int]]  # verb, name, and the channel's steps in flight
    is_large: bool  # sending takes longer than the caller has time: the engine does it
    fuses: bool  # it may send and average together with others

    def can_send(self, row: WeightRow) -> bool:
        """Return True if sending, and receiving from the neighbours, can bypass the engine."""
        ...

    def finish(self, average: SentAverage) -> torch.Tensor | Handle[torch.Tensor]:
        """Average a one-chunk tensor that was sent, or submit the rest to the engine."""
        ...

    def hand_to_engine(self, average: SentAverage) -> Handle[torch.Tensor]:
        """Submit the rest of an average to the engine, so that neighbours need not wait."""
        ...

    def submit(
        self, row: WeightRow, own: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor]:
        """Submit an average that has not started to the engine."""
        ...


class AverageCompleter(Protocol):
    """Interface of a queue that sends and completes non-blocking averages."""

    def send(self) -> None:
        """Send the tensors of all queued calls."""
        ...

    def complete(self, call: DeferredAverageHandle) -> torch.Tensor | Handle[torch.Tensor]:
        """Complete a call, or submit the rest of it to the engine."""
        ...


class AverageBatch:
    """Batch of averages that were sent together, in the order of their calls.

    ``open`` is the number of calls yet to be completed, ``since`` the time of sending.
    """

    def __init__(self) -> None:
        self.calls: list[DeferredAverageHandle] = []
        self.open, self.since = 0, time.monotonic()


class DeferredAverageHandle(Handle[torch.Tensor]):
    """Handle of a non-blocking average; polling it or waiting for it computes the average.

    If the caller does not wait soon, the engine completes it, so that neighbours need not wait.
    """

    step = -1  # until it is counted
    sent_chunks = 0
    batch: AverageBatch
    place: int  # in the batch
    found: torch.Tensor | Handle[torch.Tensor] | None = None
    error: BaseException | None = None

    def __init__(
        self,
        queue: AverageCompleter,
        path: AveragingPath,
        row: WeightRow,
        own: torch.Tensor,
        into: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        self._queue, self.path, self.row = queue, path, row
        self.own, self.into, self._out = own, into, out

    @property
    def average(self) -> SentAverage:
        """State of the average for its fast path: step, weights, tensor, output, chunks sent."""
        return self.step, self.row, self.own, self.into, self.sent_chunks

    @property
    def has_ended(self) -> bool:
        """True if the call has a result, an engine handle or an error."""
        return self.found is not None or self.error is not None

    @uncompiled
    def poll(self) -> bool:
        """Return True if the average is complete, or can be computed at once."""
        if not self.has_ended:
            self._queue.send()
        if not self.has_ended:
            rings = self.path.channel.receive_rings
            if not all([rings[peer].published(self.step) for peer in self.row.sources]):
                return False
            self._queue.complete(self)
        return self.found.poll() if isinstance(self.found, Handle) else True

    @uncompiled
    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the average and return it."""
        found = self.found
        if found is None:
            found = self._queue.complete(self)
        if isinstance(found, Handle):
            found = found.wait(timeout)
        return found if self._out is None else self._out

    def __repr__(self) -> str:
        if isinstance(self.found, Handle):
            return repr(self.found)
        state = "done" if self.has_ended else "under way"
        name, step = self.path.name, self.step
        what = repr(name) if step < 0 else MatchKey(name, step)
        return f"<Handle {self.path.verb} {what} {state}>"
