"""``low_precision_decentralized``: sends quantised differences to ring neighbours (DCD-PSGD)."""

from collections.abc import Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_interval
from asyncddp.compression import Compressor
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import detached_copy
from asyncddp.topology import GraphOrSchedule, ring
from asyncddp.topology.weights import circulant

_OWN = "replica"
_LEAST_BITS = 8
_TWO = {1: dict[int, float](), 2: {1: 2 / 3}}
"""Weights of rings of one and two ranks; with two, each is left and right neighbour at once."""


class LowPrecisionDecentralized(Algorithm):
    r"""DCD-PSGD: decentralised SGD that sends compressed differences; neighbours keep replicas.

    .. math:: q_i = Q\Big(\sum_j w_{ij} r_j - r_i + (h_i - r_i)\Big), \qquad
              r_i \leftarrow r_i + q_i, \qquad x_i \leftarrow r_i

    with :math:`h_i` the parameters after the optimizer's step and :math:`r_j` the replica of rank
    j's parameters, which rank j and its neighbours update with the same decoded bytes, so that the
    replicas are bitwise equal. By default the graph is the ring with weights of one third. The
    differences shrink as the ranks agree, and so does the compression error; it has to be small
    from the start, so that the compressor needs 8 bits per element. If the set of training ranks
    changes within ``join``, replicas are sent once uncompressed.

    Args:
        communication_interval: Steps of the optimizer, not backward passes, between exchanges, the
            first of which is in the first step; a difference contains the change of these steps.
        hierarchical: Whether the graph's nodes are machines, whose ranks average first and hold one
            model after each exchange.

    Raises:
        ArgumentError: A compressor with fewer bits.

    References:
        Tang et al., "Communication compression for decentralized training", NeurIPS 2018. Gan et
        al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2021.
    """

    name = "low_precision_decentralized"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS, CommunicationPattern.MACHINES)
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True, static_only=True)
    compression = CompressionUse.DIFFERENCES
    by_neighbor = True
    default_compression = "minmax_uint8"
    state_copies = state_copies_per_neighbor = 1

    def __init__(self, *, communication_interval: int = 1, hierarchical: bool = False) -> None:
        if hierarchical:
            self.default_communication = "hierarchical_neighbor_allreduce"
        self.communication_interval = checked_interval(communication_interval)

    @override
    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        return ring(nodes) if nodes > 2 else circulant("ring(2) of thirds", nodes, _TWO[nodes])

    @override
    def check_compressor(self, compressor: Compressor) -> None:
        bits = compressor.bits_per_element(1 << 16)
        if bits < _LEAST_BITS:
            raise ArgumentError(
                f"argument compression: {self.name} diverges with few bits: expected at least "
                f"{_LEAST_BITS} an element, as 'minmax_uint8', 'qsgd_int8' and 'bf16' have, got "
                f"{compressor!r} with {bits:.1f}; algorithm='choco_sgd' can use it"
            )

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
    ) -> Mapping[str, torch.Tensor]:
        replicas = {_of(rank): detached_copy(flat) for rank, flat in neighbors(bucket.flat).items()}
        return {_OWN: detached_copy(bucket.flat), **replicas}

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        row, state = bucket.row, bucket.state
        assert row is not None
        difference = detached_copy(bucket.flat)
        for rank in row.sources:
            difference.add_(state[_of(rank)], alpha=row.src_weights[rank])
        return difference.add_(state[_OWN], alpha=row.self_weight - 2.0)

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        for rank in received.sources:
            received.add_to(bucket.state[_of(rank)], rank)
        received.add_own_to(bucket.state[_OWN])
        bucket.flat.copy_(bucket.state[_OWN])

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        for rank, replica in neighbors(bucket.state[_OWN]).items():
            bucket.state[_of(rank)] = detached_copy(replica)  # perhaps of a new neighbour


def _of(rank: int) -> str:
    return f"replica of rank {rank}"
