"""Handles of non-blocking averages that send at once and compute the result when waited for."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import torch

from asyncddp.engine import Handle
from asyncddp.engine.messages import MatchKey
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.torch_modes import uncompiled


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached from autograd."""
    return tensor.detach() if tensor.requires_grad else tensor


class _FastPath(Protocol):
    """Fast path, as far as its handles call it: on averages whose tensors were sent."""

    deferred_handles: dict[int, Any]

    def finish(
        self,
        step: int,
        row: WeightRow,
        own: torch.Tensor,
        out: torch.Tensor | None,
        sent_chunks: int,
    ) -> torch.Tensor | Handle[torch.Tensor]: ...

    def hand_to_engine(
        self,
        step: int,
        row: WeightRow,
        own: torch.Tensor,
        out: torch.Tensor | None,
        sent_chunks: int,
    ) -> Handle[torch.Tensor]: ...


class DeferredWork(Handle[torch.Tensor]):
    """Handle of an average whose tensor was sent; the caller computes it on polling or waiting.

    If the caller does not wait soon, the engine completes it, so that neighbours need not wait.
    """

    def __init__(
        self,
        path: _FastPath,
        channel: PersistentChannel,
        step: int,
        row: WeightRow,
        own: torch.Tensor,
        out: torch.Tensor | None,
        sent_chunks: int,
    ) -> None:
        self._path, self._channel, self._step, self._row = path, channel, step, row
        self._own, self._out, self._sent_chunks = own, out, sent_chunks
        self._lock = threading.Lock()
        self._found: torch.Tensor | Handle[torch.Tensor] | None = None
        self._error: BaseException | None = None
        self.since = time.monotonic()
        channel.deferred.append(self)
        path.deferred_handles[id(self)] = self

    @uncompiled
    def poll(self) -> bool:
        """Return True if the average is complete, or can be computed at once."""
        if self._error is not None:
            return True
        if self._found is None:
            receive_ring, step = self._channel.receive_rings, self._step
            if not all([receive_ring[peer].published(step) for peer in self._row.sources]):
                return False
            self.complete()
        return self._found.poll() if isinstance(self._found, Handle) else True

    @uncompiled
    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the average and return it."""
        if self._found is None:
            self.complete()
        found = self._found
        if isinstance(found, Handle):
            found = found.wait(timeout)
        if found is None:
            raise RuntimeError("a posted tensor was neither averaged nor handed over")
        return found if self._out is None else self._out

    def complete(self) -> None:
        """Complete earlier averages of the channel and this one, or submit it to the engine."""
        if self._error is not None:
            raise self._error
        deferred = self._channel.deferred
        while deferred and deferred[0] is not self and self._found is None:
            deferred[0].complete()
        with self._lock:
            if self._found is None:
                self._found = self._path.finish(
                    self._step, self._row, self._own, self._into, self._sent_chunks
                )
                self._forget()

    def hand_to_engine(self) -> None:
        """Submit the average to the engine, unless another thread is computing it."""
        if self._lock.acquire(blocking=False):
            try:
                if self._found is None:
                    self._found = self._path.hand_to_engine(
                        self._step, self._row, self._own, self._into, self._sent_chunks
                    )
                    self._forget()
            finally:
                self._lock.release()

    def end_after_fork(self, error: BaseException) -> None:
        """End with an error in a forked process, silently: the parent completes the average."""
        self._lock, self._error = threading.Lock(), error
        self._channel.deferred.clear()

    @property
    def _into(self) -> torch.Tensor | None:
        return None if self._out is None else detached(self._out)

    def _forget(self) -> None:
        self._channel.deferred.remove(self)
        self._path.deferred_handles.pop(id(self), None)

    def __repr__(self) -> str:
        if isinstance(self._found, Handle):
            return repr(self._found)
        state = "under way" if self._found is None else "done"
        key = MatchKey(self._channel.name, self._step)
        return f"<Handle {self._channel.signature.verb} {key} {state}>"
