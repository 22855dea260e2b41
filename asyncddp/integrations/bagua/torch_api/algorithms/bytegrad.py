"""``bytegrad``: averages gradients over all ranks, quantised to 8 bits."""

from __future__ import annotations

from asyncddp.integrations.bagua.torch_api.algorithms.library_method import LibraryAlgorithm

__all__ = ["ByteGradAlgorithm"]


class ByteGradAlgorithm(LibraryAlgorithm):
    """Algorithm ``bytegrad``: averages gradients over all ranks, quantised to 8 bits.

    Args:
        hierarchical: Whether gradients are first summed within each node, uncompressed; on one node
            nothing is then quantised.
        average: Whether to average them; otherwise they are summed.
    """

    method = "bytegrad"

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average
