"""``choco_sgd``: gossip of compressed differences that preserves the mean over ranks."""

from collections.abc import Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.compressed_gossip import CompressedGossip
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.tensors.allocation import zeros_like

_OWN, _MIXED = "public copy", "mixed public copies"


class ChocoSGD(CompressedGossip):
    r"""CHOCO-SGD: decentralised SGD with any compressor, by gossip of differences to public copies.

    .. math:: q_i = Q(h_i - \hat x_i), \qquad
              \hat x_j \leftarrow \hat x_j + q_j, \qquad
              x_i \leftarrow h_i + \gamma_c \sum_j w_{ij} (\hat x_j - \hat x_i)

    with :math:`h_i` the parameters after the optimizer's step. The sum over i of the last term is
    zero, for any compressor: the mean over ranks changes by the optimizers' steps alone. A rank
    keeps :math:`\hat x_i` and :math:`\sum_j w_{ij} \hat x_j`, two models. If the set of training
    ranks changes within ``join``, public copies are sent once uncompressed, to compute that sum.

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
    state_copies = 2

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
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
        step = self.step_of(bucket)
        bucket.flat.add_(mixed, alpha=step).sub_(own, alpha=step)

    @override
    def restart(self, bucket: AveragedBucket, neighbors: NeighborTensors) -> None:
        bucket.state[_MIXED].copy_(neighbors.mixed(bucket.state[_OWN]))
