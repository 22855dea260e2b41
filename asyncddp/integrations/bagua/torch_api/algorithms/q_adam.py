"""``qadam``: Adam that averages gradients in a warm-up, and compressed momentum afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryAlgorithm
from asyncddp.optim.qadam import QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamOptimizer"]


class QAdamAlgorithm(LibraryAlgorithm):
    """Algorithm ``qadam``: averages gradients in a warm-up, and then momentum in 8 bits.

    Args:
        q_adam_optimizer: The optimizer, which is also passed to ``with_bagua``.
        hierarchical: Whether momentum is first summed within each node, uncompressed; on one node
            nothing is then quantised.
    """

    method = "qadam"

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise ArgumentError(
                "QAdamAlgorithm: argument q_adam_optimizer: expected a QAdamOptimizer, got "
                f"{type(q_adam_optimizer).__name__}"
            )
        self.optimizer, self.hierarchical = q_adam_optimizer, hierarchical

    @override
    def _arguments(self) -> dict[str, Any]:
        return {"hierarchical": self.hierarchical}

    @override
    def check_optimizers(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        if [id(one) for one in optimizers] != [id(self.optimizer)]:
            raise ArgumentError(
                "with_bagua: argument optimizers: expected the one QAdamOptimizer that "
                f"QAdamAlgorithm was given, got {[type(one).__name__ for one in optimizers]}"
            )
