"""``a2cid2``: asynchronous pairwise averaging with continuous momentum, for slow graphs."""

import math
from collections.abc import Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.algorithms.topology_requirements import TopologyRequirements, pairs_along
from asyncddp.algorithms.wrapper_setup import checked_positive
from asyncddp.topology import GraphOrSchedule, Schedule, pair_constants, random_matching

_OFFSET = "momentum"


class A2CiD2(Algorithm):
    r"""A²CiD²: asynchronous pairwise averaging, accelerated by a second copy of the parameters.

    .. math:: d(x_i, \tilde x_i) = \eta\, (\tilde x_i - x_i,\ x_i - \tilde x_i)\, dt, \qquad
              x_i \leftarrow x_i - \tfrac12 (x_i - x_j), \quad
              \tilde x_i \leftarrow \tilde x_i - \tilde\alpha (x_i - x_j), \qquad
              x_i, \tilde x_i \leftarrow x_i - U(g_i),\ \tilde x_i - U(g_i)

    for each average of a pair, as in ``ad_psgd``, and each update U of the optimizer; time t counts
    the rank's own steps. A rank keeps :math:`z = \tilde x - x`, which updates do not change: a step
    mixes by :math:`x \leftarrow x + \tfrac12 (1 - e^{-2\eta}) z`,
    :math:`z \leftarrow e^{-2\eta} z`, and an average that changes x by d changes z by
    :math:`(2\tilde\alpha - 1) d`. With

    .. math:: \eta = \frac{1}{2 \sqrt{\chi_1 \chi_2}}, \qquad
              \tilde\alpha = \frac12 \sqrt{\frac{\chi_1}{\chi_2}}

    ranks agree after a time that grows with :math:`\sqrt{\chi_1 \chi_2}` in place of
    :math:`\chi_1`, on a ring with n in place of n², and all else is as with ``ad_psgd``.
    :func:`.topology.pair_constants` gives :math:`\chi_1` and :math:`\chi_2` of the topology in use.

    Args:
        rate: :math:`\eta` of at least 0, per step; None takes that of the topology. With 0 x is
            what it is in ``ad_psgd``.
        pair_step: :math:`\tilde\alpha` of at least 0; None takes that of the topology.

    Raises:
        ArgumentError: A number out of range.

    References:
        Nabli, Belilovsky, Oyallon, "A²CiD²: accelerating asynchronous communication in
        decentralized deep learning", NeurIPS 2023.
    """

    name = "a2cid2"
    when = CommunicationTiming.BEFORE_FORWARD
    how = (CommunicationPattern.PAIR,)
    needs = TopologyRequirements(symmetric=True, strongly_connected=True, pairs=True)
    scales_steps = False
    state_copies = 1

    def __init__(self, *, rate: float | None = None, pair_step: float | None = None) -> None:
        self.rate = rate if rate is None else checked_positive("argument rate", rate, or_zero=True)
        self.pair_step = pair_step
        if pair_step is not None:
            self.pair_step = checked_positive("argument pair_step", pair_step, or_zero=True)
        self._coefficients = 0.0, 0.5

    @override
    def default_topology(self, nodes: int) -> GraphOrSchedule | None:
        return random_matching(nodes)

    @override
    def schedule_along(self, given: GraphOrSchedule) -> Schedule:
        schedule = pairs_along(given)
        chi1, chi2 = pair_constants(schedule)
        rate = 0.5 / math.sqrt(chi1 * chi2) if chi1 else 0.0
        pair_step = 0.5 * math.sqrt(chi1 / chi2) if chi1 else 0.5
        self._coefficients = (
            rate if self.rate is None else self.rate,
            pair_step if self.pair_step is None else self.pair_step,
        )
        return schedule

    @override
    def initial_state(
        self, bucket: AveragedBucket, neighbors: NeighborTensors
    ) -> Mapping[str, torch.Tensor]:
        return {_OFFSET: bucket.new_state()}

    @override
    def incoming(self, bucket: AveragedBucket, received: Received) -> None:
        _, pair_step = self._coefficients
        moved = received.mixed.to(bucket.state[_OFFSET].dtype) - bucket.flat
        bucket.state[_OFFSET].add_(moved, alpha=2 * pair_step - 1)
        bucket.flat.copy_(received.mixed)

    @override
    def after_step(self, bucket: AveragedBucket) -> None:
        rate, _ = self._coefficients
        offset, left = bucket.state[_OFFSET], math.exp(-2 * rate)
        bucket.flat.add_(offset, alpha=(1 - left) / 2)
        offset.mul_(left)
