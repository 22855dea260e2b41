"""``async``: averages models by the clock, while training goes on."""

from __future__ import annotations

from typing import Literal

import torch

from asyncddp.integrations.bagua.torch_api.algorithms.base import wrapped_model
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryAlgorithm

__all__ = ["AsyncModelAverageAlgorithm"]


class AsyncModelAverageAlgorithm(LibraryAlgorithm):
    """Averages models by the clock: the method ``async_model_average`` with an interval.

    What averaging has changed is added between two steps, which never wait for other ranks.

    Args:
        peer_selection_mode: ``"all"``, or ``"neighbors"`` of the topology, which Bagua has not.
        sync_interval_ms: Milliseconds from the end of a round to the next one.
        warmup_steps: Steps that ``gradient_allreduce`` makes before.
    """

    method = "async_model_average"

    def __init__(
        self,
        peer_selection_mode: Literal["all", "neighbors"] = "all",
        sync_interval_ms: float = 500,
        warmup_steps: int = 0,
    ) -> None:
        self.peer_selection_mode, self.sync_interval_ms = peer_selection_mode, sync_interval_ms
        self.warmup_steps = warmup_steps

    def abort(self, bagua_ddp: torch.nn.Module) -> None:
        """End averaging of a wrapped model, once all ranks have called it; collective.

        Call it before evaluation, and at the end. The replicas differ then by the steps since the
        last round; :func:`asyncddp.average_model` shows their average.
        """
        wrapped_model("abort", bagua_ddp).abort()

    def resume(self, bagua_ddp: torch.nn.Module) -> None:
        """Let averaging of a wrapped model go on after :meth:`abort`; all ranks call it."""
        wrapped_model("resume", bagua_ddp).resume()
