"""Handles of non-blocking averages that send at once and compute the result when waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

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


class DeferredAverageHandle(Handle[torch.Tensor]):
    """Handle of an average: the tensor is sent at once; polling or waiting computes the average.

    If the caller does not wait soon, the engine completes it, so that neighbours need not wait.
    """

    def __init__(
        self,
        channel: PersistentChannel,
        handles: dict[int, Any],
        average: SentAverage,
        out: torch.Tensor | None,
        finish: Callable[[SentAverage], torch.Tensor | Handle[torch.Tensor]],
        submit: Callable[[SentAverage], Handle[torch.Tensor]],
    ) -> None:
        self._channel, self._handles, self._average, self._out = channel, handles, average, out
        self._finish, self._submit = finish, submit
        self._lock = threading.Lock()
        self._found: torch.Tensor | Handle[torch.Tensor] | None = None
        self._error: BaseException | None = None
        self.since = time.monotonic()
        channel.deferred.append(self)
        handles[id(self)] = self

    @uncompiled
    def poll(self) -> bool:
        """Return True if the average is complete, or can be computed at once."""
        if self._error is not None:
            return True
        if self._found is None:
            (step, row, *_), receive_rings = self._average, self._channel.receive_rings
            if not all([receive_rings[peer].published(step) for peer in row.sources]):
                return False
            self.complete()
        return self._found.poll() if isinstance(self._found, Handle) else True

    @uncompiled
    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the average and return it."""
        found = self._found
        if found is None:
            found = self.complete()
        if isinstance(found, Handle):
            found = found.wait(timeout)
        return found if self._out is None else self._out

    def complete(self) -> torch.Tensor | Handle[torch.Tensor]:
        """Complete earlier averages of the channel and this one, or submit it to the engine."""
        if self._error is not None:
            raise self._error
        deferred = self._channel.deferred
        while deferred and deferred[0] is not self and self._found is None:
            deferred[0].complete()
        with self._lock:
            if self._found is None:
                self._found = self._finish(self._average)
                self._forget()
            return self._found

    def hand_to_engine(self) -> None:
        """Submit the average to the engine, unless another thread is computing it."""
        if self._lock.acquire(blocking=False):
            try:
                if self._found is None:
                    self._found = self._submit(self._average)
                    self._forget()
            finally:
                self._lock.release()

    def end_after_fork(self, error: BaseException) -> None:
        """End with an error in a forked process, silently: the parent completes the average."""
        self._lock, self._error = threading.Lock(), error
        self._channel.deferred.clear()

    def _forget(self) -> None:
        self._channel.deferred.remove(self)
        self._handles.pop(id(self), None)

    def __repr__(self) -> str:
        if isinstance(self._found, Handle):
            return repr(self._found)
        state = "under way" if self._found is None else "done"
        key = MatchKey(self._channel.name, self._average[0])
        return f"<Handle {self._channel.signature.verb} {key} {state}>"
