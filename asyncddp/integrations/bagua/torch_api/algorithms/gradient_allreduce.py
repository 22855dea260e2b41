"""``gradient_allreduce``: averages gradients over all ranks."""

from __future__ import annotations

from typing_extensions import override

from asyncddp.algorithms.methods.gradient_allreduce import GradientAllreduce
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import (
    LibraryAlgorithm,
    LibraryMethod,
    SumOfRanks,
)
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup

__all__ = ["GradientAllReduceAlgorithm"]


class _SummedGradients(SumOfRanks, GradientAllreduce):
    """``gradient_allreduce`` that gives sums."""


class GradientAllReduceAlgorithm(LibraryAlgorithm):
    """Averages gradients over all ranks: the method ``gradient_allreduce``.

    Args:
        hierarchical: Whether gradients are summed inside each node first.
        average: Whether to average them; otherwise they are summed.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    @override
    def reify(self, process_group: BaguaProcessGroup) -> LibraryMethod:
        options = {"hierarchical": self.hierarchical}
        if self.average:
            return LibraryMethod("gradient_allreduce", options, averages_gradients=True)
        ranks = {"ranks": len(process_group.ranks)}
        return LibraryMethod(_SummedGradients, {**options, **ranks}, averages_gradients=True)
