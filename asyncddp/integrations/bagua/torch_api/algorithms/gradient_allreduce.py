"""``gradient_allreduce``: averages gradients over all ranks."""

from __future__ import annotations

from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryAlgorithm

__all__ = ["GradientAllReduceAlgorithm"]


class GradientAllReduceAlgorithm(LibraryAlgorithm):
    """Algorithm ``gradient_allreduce``: averages gradients over all ranks.

    Args:
        hierarchical: Whether gradients are first summed within each node.
        average: Whether to average them; otherwise they are summed.
    """

    method = "gradient_allreduce"

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average
