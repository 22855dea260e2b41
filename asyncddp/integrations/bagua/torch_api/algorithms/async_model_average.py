"""``async``: averages models at fixed time intervals, in the background of training."""

from __future__ import annotations

from typing import Literal

import torch

from asyncddp.integrations.bagua.torch_api.algorithms.base import wrapped_model
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryAlgorithm

__all__ = ["AsyncModelAverageAlgorithm"]


class AsyncModelAverageAlgorithm(LibraryAlgorithm):
    """Algorithm ``async``: averages models at fixed time intervals (``async_model_average``).

    The change made by averaging is added between two steps, which never wait for other ranks.

    Args:
        peer_selection_mode: ``"all"``, or ``"neighbors"`` of the topology, which Bagua lacks.
        sync_interval_ms: Milliseconds from the end of a round to the start of the next.
        warmup_steps: Number of ``gradient_allreduce`` steps before averaging starts.
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
        """Stop the averaging of a wrapped model, once all ranks have called it; collective.

        Call it before evaluation, and at the end of training. The replicas then differ by the steps
        since the last round; :func:`asyncddp.average_model` shows their average.
        """
        wrapped_model("abort", bagua_ddp).abort()

    def resume(self, bagua_ddp: torch.nn.Module) -> None:
        """Resume the averaging of a wrapped model after :meth:`abort`; all ranks call it."""
        wrapped_model("resume", bagua_ddp).resume()
