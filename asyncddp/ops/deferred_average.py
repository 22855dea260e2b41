"""Handles of non-blocking averages by fast paths, which are computed when they are waited for."""

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
    """Fast path of the averages under one name, as their handles see it."""

    channel: PersistentChannel
    verb: str
    name: str
    use: tuple[str, str, deque[int]]  # verb, name, and the channel's steps in flight
    is_large: bool  # sending takes longer than the caller has time: the engine does it
    fuses: bool  # it may send and average together with others

    def can_send(self, row: WeightRow) -> bool:
        """Tell whether a tensor can be sent, and its neighbours' received, without the engine."""
        ...

    def finish(self, average: SentAverage) -> torch.Tensor | Handle[torch.Tensor]:
        """Average a tensor of one chunk that was sent, or submit the rest to the engine."""
        ...

    def hand_to_engine(self, average: SentAverage) -> Handle[torch.Tensor]:
        """Submit the rest of an average to the engine, so that neighbours need not wait for it."""
        ...

    def submit(
        self, row: WeightRow, own: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor]:
        """Submit an average of which nothing has begun to the engine."""
        ...


class AverageCompleter(Protocol):
    """Queue of averages, as their handles see it."""

    def send(self) -> None:
        """Send the tensors of all calls that are yet to be sent."""
        ...

    def complete(self, call: DeferredAverageHandle) -> torch.Tensor | Handle[torch.Tensor]:
        """Complete a call, or submit the rest of it to the engine."""
        ...


class AverageBatch:
    """Averages that were sent together, in the order of their calls, and since when.

    So many of them are ``open``: the queue has not done with them.
    """

    def __init__(self) -> None:
        self.calls: list[DeferredAverageHandle] = []
        self.open, self.since = 0, time.monotonic()


class DeferredAverageHandle(Handle[torch.Tensor]):
    """Handle of an average; polling or waiting for it computes it.

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
        """Average that its fast path completes, once it is counted."""
        return self.step, self.row, self.own, self.into, self.sent_chunks

    @property
    def has_ended(self) -> bool:
        """True if the queue has nothing more to do with it."""
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
