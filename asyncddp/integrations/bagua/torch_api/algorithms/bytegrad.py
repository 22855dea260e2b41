"""``bytegrad``: averages gradients over all ranks, quantised to 8 bits."""

from __future__ import annotations

from typing_extensions import override

from asyncddp.algorithms.methods.bytegrad import ByteGrad
from asyncddp.integrations.bagua.torch_api.algorithms.library_method import (
    LibraryAlgorithm,
    LibraryMethod,
    SumOfRanks,
)
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup

__all__ = ["ByteGradAlgorithm"]


class _SummedGradients(SumOfRanks, ByteGrad):
    """``bytegrad`` that gives sums."""


class ByteGradAlgorithm(LibraryAlgorithm):
    """Averages gradients over all ranks in 8 bits: the method ``bytegrad``.

    Args:
        hierarchical: Whether gradients are summed inside each node first, as they are; on one node
            nothing is quantised then.
        average: Whether to average them; otherwise they are summed.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    @override
    def reify(self, process_group: BaguaProcessGroup) -> LibraryMethod:
        options = {"hierarchical": self.hierarchical}
        if self.average:
            return LibraryMethod("bytegrad", options, averages_gradients=True)
        ranks = {"ranks": len(process_group.ranks)}
        return LibraryMethod(_SummedGradients, {**options, **ranks}, averages_gradients=True)
