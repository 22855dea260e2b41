"""Simulated time and bytes sent of synchronous ranks, by the cost model of their links."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from asyncddp.simulate.averaging import Traffic
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.simulate.scenario import Mask, Numbers, Scenario
from asyncddp.topology import Cost, communication_cost, ring


class RankClocks:
    r"""Clock of each simulated rank; a rank continues when all expected messages have arrived.

    .. math:: t_i \leftarrow \max\Big(t_i + c_i,\ \max_j \big(s_j + T_{ij} + \delta_j\big)\Big)

    with :math:`c_i` the time of a step on rank i, :math:`s_j` when rank j sends, at the beginning
    of the step where communication is hidden behind it and at the end otherwise, :math:`T_{ij}` the
    time of the message by :class:`.topology.Links` and :math:`\delta_j` the delay of j's messages.
    An average over all ranks begins when the last one is there, and takes the time of the fastest
    allreduce of :func:`.topology.communication_cost`, or of the hierarchical one where one rank of
    each machine averages for the others. A message that is sent again comes so much later; of each
    round of an allreduce, the last one counts.

    Args:
        scenario: Speeds, links, delays and losses.
        ranks: Number of ranks.
        scale: Factor on bytes, if the model stands for a larger one.

    Attributes:
        now: Seconds since the start, ``(n,)``.
        bytes_sent: Bytes sent by each rank, ``(n,)``.
    """

    def __init__(self, scenario: Scenario, ranks: int, scale: float = 1.0) -> None:
        self._scenario, self._compute = scenario, scenario.compute_seconds(ranks)
        self._scale, self.bytes_sent = scale, np.zeros(ranks)
        self._delays = scenario.delays(ranks)
        self.now: Numbers = np.zeros(ranks)
        self._allreduce = lru_cache(maxsize=None)(self._allreduce_cost)
        self._times: dict[tuple[int, float], tuple[MixingRound, Numbers]] = {}

    def admit(self, sponsors: Mapping[int, int], nbytes: float) -> None:
        """Let each rank that arrives begin when it has got ``nbytes`` from its sponsor."""
        links = self._scenario.network
        for rank, sponsor in sponsors.items():
            ends = np.array([sponsor]), np.array([rank])
            seconds = links.latencies(*ends) + links.transfers(*ends, nbytes * self._scale)
            self.now[rank] = self.now[sponsor] + seconds[0]
            self.bytes_sent[sponsor] += nbytes * self._scale

    def advance(self, traffic: Traffic | None, active: Mask, *, hidden: bool) -> None:
        """Advance the clocks of all active ranks by one step.

        Args:
            traffic: What they send in it; None for nothing.
            active: The ranks that are there.
            hidden: Whether messages travel while gradients are computed.
        """
        ready = self.now + np.where(active, self._compute, 0.0)  # those that have left may relay
        sent = self.now if hidden else ready
        if traffic is not None:
            self.count(traffic)
        if traffic is None:
            after = ready
        elif traffic.mixing is None:
            cost = self._allreduce(len(active), traffic.nbytes, by_leaders=traffic.by_leaders)
            rounds = round(cost.rounds)
            at_once = round(len(active) * cost.messages_per_rank / max(rounds, 1))
            again = self._scenario.seconds_again(traffic.number, rounds, at_once)
            wait = cost.seconds + again
            after = np.maximum(ready, np.max((sent + self._delays)[active]) + wait)
        else:
            mixing = traffic.mixing
            arrived = sent[mixing.sources] + self._message_seconds(mixing, traffic.nbytes)
            if traffic.failures is not None:
                arrived += traffic.failures * (self._scenario.retransmit_after or 0.0)
            after = ready.copy()
            np.maximum.at(after, mixing.targets, arrived)
        self.now = after

    def count(self, traffic: Traffic) -> None:
        """Count the bytes of messages, which travel behind the steps that follow unless waited."""
        traffic.nbytes *= self._scale
        self.bytes_sent += traffic.bytes_sent

    def _message_seconds(self, mixing: MixingRound, nbytes: float) -> Numbers:
        key = id(mixing), nbytes
        if key not in self._times:
            if len(self._times) > 256:
                self._times.clear()
            messages, links = (mixing.sources, mixing.targets), self._scenario.network
            seconds = links.latencies(*messages) + links.transfers(*messages, nbytes)
            self._times[key] = mixing, seconds + self._delays[mixing.sources]
        return self._times[key][1]

    def _allreduce_cost(self, ranks: int, nbytes: float, *, by_leaders: bool) -> Cost:
        if ranks == 1:
            return Cost(0.0, 0.0, 0.0, 0.0)
        cost = communication_cost(ring(ranks), nbytes, self._scenario.network)
        if by_leaders:
            return cost.hierarchical_allreduce
        return min(cost.allreduces.values(), key=lambda one: one.seconds)
