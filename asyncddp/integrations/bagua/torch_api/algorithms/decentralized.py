"""Decentralised algorithms: average parameters, directly or through compressed differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from asyncddp.integrations.bagua.errors import UnmanagedParameterError
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryAlgorithm
from asyncddp.integrations.bagua.torch_api.model_state import unmanaged_parameters

__all__ = ["DecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithm"]


class DecentralizedAlgorithm(LibraryAlgorithm):
    """Algorithm ``decentralized``: averages parameters while gradients are computed.

    Args:
        hierarchical: Whether the peers are nodes, whose ranks average first; nodes are weighted by
            their numbers of ranks.
        peer_selection_mode: ``"all"``, or ``"shift_one"`` for one peer that changes.
        communication_interval: Number of steps from one average to the next, starting with the
            first step.
    """

    method = "decentralized"

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: Literal["all", "shift_one"] = "all",
        communication_interval: int = 1,
    ) -> None:
        self.hierarchical, self.peer_selection_mode = hierarchical, peer_selection_mode
        self.communication_interval = communication_interval

    @override
    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        if self.hierarchical and self.peer_selection_mode == "all":
            arguments["communication"] = "hierarchical_allreduce"  # nodes may have any sizes
        return arguments


class LowPrecisionDecentralizedAlgorithm(LibraryAlgorithm):
    """Algorithm ``low_precision_decentralized``: exchanges quantised differences on a ring.

    Args:
        hierarchical: Whether the ring consists of nodes, whose ranks average first.
        communication_interval: Number of steps from one exchange to the next, starting with the
            first step.
    """

    method = "low_precision_decentralized"

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical, self.communication_interval = hierarchical, communication_interval

    @override
    def check_optimizers(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        for name, _ in unmanaged_parameters(module, optimizers):
            raise UnmanagedParameterError(
                f"with_bagua: parameter {name} belongs to none of the optimizers, in whose "
                "steps low_precision_decentralized communicates; give its optimizer too, or "
                "freeze it by requires_grad_(False)"
            )
