"""``choco_sgd``: gossip of compressed differences that keeps the mean over ranks exactly."""

from collections.abc import Callable, Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import (
    Algorithm,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.compression.typical_contraction import typical_contraction
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import zeros_like
from topology import GraphOrSchedule, symmetric_exponential

_SAMPLE = 1 << 16  # elements that tell how much a compressor keeps
_OWN, _MIXED = "public copy", "mixed public copies"


class ChocoSGD(Algorithm):
    r"""Decentralised SGD with any compressor: gossip of differences to public copies.

    .. math:: q_i = Q(h_i - \hat x_i), \qquad
              \hat x_j \leftarrow \hat x_j + q_j, \qquad
              x_i \leftarrow h_i + \gamma_c \sum_j w_{ij} (\hat x_j - \hat x_i)

    with :math:`h_i` the parameters after the optimizer's step. The sum over i of the last term is
    zero, whatever the compressor: the mean over ranks moves by the optimizers' steps alone. A
    rank keeps :math:`\hat x_i` and :math:`\sum_j w_{ij} \hat x_j`, two models.

    Args:
        consensus_step: :math:`\gamma_c` in (0, 1]; None takes the share of the squared norm that
            the compressor keeps of normally distributed numbers: 1 for 8 bits, 0.64 for signs, 0.08
            for the largest hundredth. With a larger one the ranks may diverge, a smaller one is
            slower.
        hierarchical: Whether the graph's nodes are machines, whose ranks average first and hold one
            model after each exchange.

    Raises:
        ArgumentError: A step outside of (0, 1].

    References:
        Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip algorithms with
        compressed communication", ICML 2019.
    """

    name = "choco_sgd"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS, CommunicationPattern.MACHINES)
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
    compression = CompressionUse.DIFFERENCES
    default_compression = "qsgd_int8"
    state_copies = 2

    def __init__(self, *, consensus_step: float | None = None, hierarchical: bool = False) -> None:
        if hierarchical:
            self.default_communication = "hierarchical_neighbor_allreduce"
        if consensus_step is not None and not 0 < consensus_step <= 1:
            raise ArgumentError(
                "argument consensus_step: expected a number above 0 and at most 1, or None, got "
                f"{consensus_step!r}"
            )
        self.consensus_step = consensus_step

    @override
    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        return symmetric_exponential(nodes)

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: Callable[[], Mapping[int, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        return {_OWN: zeros_like(bucket.flat), _MIXED: zeros_like(bucket.flat)}

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return bucket.flat - bucket.state[_OWN]

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        own, mixed = bucket.state[_OWN], bucket.state[_MIXED]
        received.add_own_to(own)
        mixed.add_(received.mixed)
        step = self.consensus_step
        if step is None and bucket.compressor is not None:
            numel = min(bucket.flat.shape[-1], _SAMPLE)
            step = typical_contraction(bucket.compressor.compressor, numel)
        bucket.flat.add_(mixed, alpha=step or 1.0).sub_(own, alpha=step or 1.0)
