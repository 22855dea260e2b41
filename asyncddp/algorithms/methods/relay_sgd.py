"""``relay_sgd``: uniform averages over all ranks, by sums of models relayed along a tree."""

from collections.abc import Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    JoinedRanks,
)
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.compression import Compressor
from asyncddp.errors import ArgumentError
from asyncddp.topology import tree

_MESSAGE, _COUNT = "sum of rank {}", "count of rank {}"


class RelaySGD(Algorithm):
    r"""RelaySGD: uniform averages of all ranks' models, which neighbours relay along a tree.

    .. math:: m_{i \to j}^{+} = h_i + \sum_{k \in N(i) \setminus j} m_{k \to i}, \qquad
              c_{i \to j}^{+} = 1 + \sum_{k \in N(i) \setminus j} c_{k \to i}, \qquad
              x_i^{+} = \frac1n \Big(h_i \big(n - \sum_j c_{j \to i}^{+}\big)
              + \sum_j m_{j \to i}^{+}\Big)

    with :math:`h_i` the parameters after the optimizer's step and N(i) the neighbours in a tree.
    The models of all ranks have equal weight, and are d steps old at distance d; weights of the
    graph are ignored. So there is no bias from W, even if the ranks' data differ. Longer paths need
    smaller steps: the default graph is the binary tree, with paths of up to :math:`2 \log_2 n`. A
    rank keeps one model per neighbour, and sends each neighbour a different sum, with its count.
    Sums are in float32 for half-precision parameters. Within ``join``, joined ranks relay sums
    without a model of their own; active ranks use their own model in its place.

    References:
        Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for decentralized deep
        learning on heterogeneous data", NeurIPS 2021.
    """

    name = "relay_sgd"
    when = CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS,)
    default_graph = tree
    needs = TopologyRequirements(static_only=True, tree=True)
    exact = True
    compression = CompressionUse.DIFFERENCES
    by_neighbor = True
    joined_ranks = JoinedRanks.RELAY
    state_copies_per_neighbor = 1

    @override
    def check_compressor(self, compressor: Compressor) -> None:
        raise ArgumentError(
            f"argument compression: {self.name} relays sums, in which errors would add up; "
            f"expected None, or algorithm='choco_sgd', got {compressor!r}"
        )

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
    ) -> Mapping[str, torch.Tensor]:
        sources = list(neighbors(bucket.flat[:1]))
        sums = {_MESSAGE.format(rank): bucket.new_state() for rank in sources}
        return {**sums, **{_COUNT.format(rank): bucket.new_state()[0].clone() for rank in sources}}

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        row = bucket.row
        assert row is not None
        near = {*row.sources, *row.targets}
        if near and any(_MESSAGE.format(rank) not in bucket.state for rank in near):
            bucket.state.clear()  # a tree with other edges: nothing has been relayed along them
            for rank in near:
                bucket.state[_MESSAGE.format(rank)] = bucket.new_state()
                bucket.state[_COUNT.format(rank)] = bucket.new_state()[0].clone()

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        own = bucket.new_state()
        if bucket.joined:
            return torch.cat([own, own.new_zeros(1)])
        return torch.cat([own.copy_(bucket.flat), own.new_ones(1)])

    @override
    def outgoing_to_each(
        self, bucket: AveragedBucket, sent: torch.Tensor
    ) -> Mapping[int, torch.Tensor] | None:
        row = bucket.row
        assert row is not None
        strangers = [
            r for r in (*row.sources, *row.targets) if _MESSAGE.format(r) not in bucket.state
        ]
        if strangers:
            raise ArgumentError(
                f"arguments src_weights, dst_weights: {self.name} relays along the edges of its "
                f"tree, and rank {strangers[0]} is no neighbour there; leave them None, or give "
                "another tree as topology"
            )
        relayed = {rank: self._received(bucket, rank) for rank in row.sources}
        return {
            target: sent + sum(one for rank, one in relayed.items() if rank != target)
            for target in row.targets
        }

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        total, count = bucket.new_state(), bucket.new_state()[0]
        for rank in received.sources:
            message = torch.cat([bucket.new_state(), count.new_zeros(1)])
            received.add_to(message, rank)
            bucket.state[_MESSAGE.format(rank)].copy_(message[:-1])
            bucket.state[_COUNT.format(rank)].copy_(message[-1])
            total.add_(message[:-1])
            count = count + message[-1]
        if bucket.joined:
            return
        total.add_(bucket.flat * (bucket.nodes - count))
        bucket.flat.copy_(total.div_(bucket.nodes))

    def _received(self, bucket: AveragedBucket, rank: int) -> torch.Tensor:
        """Return the last sum of a neighbour, with its count as the last element."""
        state = bucket.state
        return torch.cat([state[_MESSAGE.format(rank)], state[_COUNT.format(rank)].view(1)])
