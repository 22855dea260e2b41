"""``moniqua``: sends models in few bits, modulo a bound on the difference between ranks."""

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.compressed_gossip import CompressedGossip
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.algorithms.wrapper_setup import checked_positive
from asyncddp.compression import Compressor
from asyncddp.compression.largest_error import largest_error
from asyncddp.errors import ArgumentError

_LARGEST = 0.1  # error at which neighbours still come nearer


class Moniqua(CompressedGossip):
    r"""Moniqua: gossip of quantised models, sent modulo a bound on the ranks' differences.

    .. math:: q_i = Q\Big(\frac{h_i}{B} \bmod 1\Big), \qquad B = \frac{2 \theta}{1 - 2 \delta}, \\
              r_{ij} = (B q_j - h_i) \bmod B, \qquad
              x_i \leftarrow h_i + \gamma_c \sum_j w_{ij} (r_{ij} - r_{ii})

    with :math:`h_i` the parameters after the optimizer's step, remainders in
    :math:`[-\tfrac12, \tfrac12]` times the divisor, and :math:`\delta` the largest error of Q on
    remainders by 1. As long as parameters of neighbours differ by at most :math:`\theta`, which you
    know or guess, :math:`h_i + r_{ij}` equals :math:`h_j` up to :math:`B \delta`; with larger
    differences, ranks stay multiples of B apart. The mean over ranks changes by the optimizers'
    steps alone. It has no state. Errors do not vanish: ranks stay about :math:`B \delta` apart.

    Args:
        theta: :math:`\theta` above 0.
        consensus_step: :math:`\gamma_c` in (0, 1]; less than 1 for few bits.
        hierarchical: Whether the graph's nodes are machines, whose ranks average first and hold one
            model after each exchange.

    Raises:
        ArgumentError: A number out of range, or a compressor whose errors are too large.

    References:
        Lu, De Sa, "Moniqua: modulo quantized communication in decentralized SGD", ICML 2020.
    """

    name = "moniqua"
    needs = TopologyRequirements(doubly_stochastic=True, symmetric=True)
    how = (CommunicationPattern.NEIGHBORS, CommunicationPattern.MACHINES)
    by_neighbor = True
    default_compression = "minmax_uint8"

    def __init__(
        self, *, theta: float = 2.0, consensus_step: float = 1.0, hierarchical: bool = False
    ) -> None:
        super().__init__(consensus_step=consensus_step, hierarchical=hierarchical)
        self.theta = checked_positive("argument theta", theta)

    @override
    def check_compressor(self, compressor: Compressor) -> None:
        error = largest_error(compressor)
        if compressor.needs_state or not error <= _LARGEST:
            raise ArgumentError(
                f"argument compression: {self.name} needs each element by itself, to "
                f"{_LARGEST} of the range; expected 'minmax_uint8', 'qsgd_int8', 'qsgd_int4' or "
                f"'bf16', or algorithm='choco_sgd', which takes any, got {compressor!r}"
            )

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        return _remainder(bucket.new_state().copy_(bucket.flat).div_(self._divisor(bucket)))

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        row, divisor = bucket.row, self._divisor(bucket)
        assert row is not None
        own, change = bucket.new_state().copy_(bucket.flat).div_(-divisor), bucket.new_state()
        for rank in received.sources:
            apart = own.clone()
            received.add_to(apart, rank)
            change.add_(_remainder(apart), alpha=row.src_weights[rank])
        received.add_own_to(own)
        change.sub_(_remainder(own), alpha=sum(row.src_weights.values()))
        bucket.flat.add_(change, alpha=divisor * self.step_of(bucket))

    def _divisor(self, bucket: AveragedBucket) -> float:
        """Return the divisor B."""
        codec = bucket.compressor
        error = 0.0 if codec is None else largest_error(codec.compressor)
        return 2.0 * self.theta / (1.0 - 2.0 * error)


def _remainder(flat: torch.Tensor) -> torch.Tensor:
    """Replace numbers by their remainders modulo 1, from -1/2 to 1/2, in place."""
    return flat.sub_(flat.round())
