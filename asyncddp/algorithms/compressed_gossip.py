"""Base class of compressed gossip algorithms, which average tensors as neighbours decode them."""

from __future__ import annotations

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.compression.typical_contraction import typical_contraction
from asyncddp.errors import ArgumentError
from asyncddp.topology import symmetric_exponential

_SAMPLE = 1 << 16  # elements that tell how much a compressor keeps


class CompressedGossip(Algorithm):
    r"""Base class of compressed gossip algorithms, with a step size that suits the compressor.

    .. math:: x_i \leftarrow h_i + \gamma_c \sum_j w_{ij} (q_j - q_i)

    with :math:`h_i` the parameters after the optimizer's step, and :math:`q_j` the decoded tensor
    of rank j. As W is symmetric, the last terms sum to zero over i, for any compressor: the mean
    over ranks changes by the optimizers' steps alone.

    Args:
        consensus_step: :math:`\gamma_c` in (0, 1]; None takes the share of the squared norm that
            the compressor keeps of normally distributed numbers.
        hierarchical: Whether the graph's nodes are machines, whose ranks average first and hold one
            model after each exchange.

    Raises:
        ArgumentError: A step outside of (0, 1].
    """

    when = CommunicationTiming.AFTER_STEP
    how: tuple[CommunicationPattern, ...] = (
        CommunicationPattern.NEIGHBORS,
        CommunicationPattern.MACHINES,
    )
    default_graph = symmetric_exponential
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
    compression = CompressionUse.DIFFERENCES
    default_compression = "qsgd_int8"

    def __init__(self, *, consensus_step: float | None = None, hierarchical: bool = False) -> None:
        if hierarchical:
            self.default_communication = "hierarchical_neighbor_allreduce"
        if consensus_step is not None and not 0 < consensus_step <= 1:
            raise ArgumentError(
                "argument consensus_step: expected a number above 0 and at most 1, or None, got "
                f"{consensus_step!r}"
            )
        self.consensus_step = consensus_step

    def step_of(self, bucket: AveragedBucket) -> float:
        r"""Return the step size :math:`\gamma_c` for a bucket."""
        step = self.consensus_step
        if step is None and bucket.compressor is not None:
            numel = min(bucket.flat.shape[-1], _SAMPLE)
            step = typical_contraction(bucket.compressor.compressor, numel)
        return step or 1.0
