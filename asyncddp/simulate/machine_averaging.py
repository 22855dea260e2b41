"""Hierarchical averaging in simulations: between neighbour machines, or over all machines."""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import override

from asyncddp.simulate.averaging import GlobalAveraging, NeighborAveraging, Traffic
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.simulate.rank_codecs import RankCodecs
from asyncddp.simulate.scenario import Numbers
from asyncddp.simulate.simulated_bucket import SimulatedBucket
from asyncddp.tensors.means import first_divisor


class MachineAveraging(NeighborAveraging):
    """Simulated averaging inside each machine, then with neighbour machines by weights.

    Each rank sends its share of the mean to the same rank of a neighbour machine, encoded by itself
    where there is a compressor.
    """

    of_machines = True

    @override
    def _make_round(self, number: int) -> MixingRound:
        return super()._make_round(number).between_machines(self._scenario.ranks_per_machine)

    @override
    def average(self, bucket: SimulatedBucket) -> float:
        return super().average(bucket) / self._scenario.ranks_per_machine

    @override
    def _encode(self, codecs: RankCodecs, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        local = self._scenario.ranks_per_machine
        means = mean_by_machine(sent, local)
        return means, codecs.decoded_shares(means, local)

    @override
    def _own_weights(self, mixing: MixingRound) -> Numbers:
        # a machine has its own mean as it is: w_mm is spread over the ranks of its block of W
        return self._scenario.ranks_per_machine * mixing.own_weights


class LeaderAveraging(NeighborAveraging):
    """Simulated averaging between machines' first ranks, for algorithms that send differences.

    The first rank keeps the method's state and compresses what it sends, see
    :class:`asyncddp.algorithms.leader_round.LeaderRound`. Buckets have a row for each machine.
    """

    of_machines = True

    @override
    def traffic(self, nbytes: float) -> Traffic:
        sent = self.round_of(self._number).between_leaders(self._scenario.ranks_per_machine)
        return self._traffic_of(sent, sent.messages_sent, nbytes)

    @override
    def average(self, bucket: SimulatedBucket) -> float:
        local, whole = self._scenario.ranks_per_machine, bucket.of_all_ranks
        whole.copy_(mean_by_machine(whole, local))
        nbytes = super().average(bucket)
        whole.copy_(bucket.bucket.flat.repeat_interleave(local, dim=0))
        return nbytes


class HierarchicalAveraging(GlobalAveraging):
    """Simulated average or sum over all ranks; only one rank per machine uses the network.

    That rank sums over its machine, and compresses the sum if there is a compressor.
    """

    @property
    def _leaders(self) -> list[int]:
        return list(range(0, len(self.active), self._scenario.ranks_per_machine))

    @property
    @override
    def _parts(self) -> int:
        return len(self._leaders)

    @override
    def _decoded_average(self, codecs: RankCodecs, sent: torch.Tensor) -> torch.Tensor:
        leaders = self._leaders
        if len(leaders) == 1:
            return self._averaged(sent)[0]
        parts = torch.split(sent, self._scenario.ranks_per_machine)
        first = first_divisor(len(parts[0])) if self.divisor > 1 else 1
        sums = torch.stack([part.sum(dim=0) / first for part in parts])
        return codecs.averaged(sums, self.divisor / first, leaders)

    @override
    def traffic(self, nbytes: float) -> Traffic:
        leaders = np.zeros(len(self.active), dtype=bool)
        leaders[self._leaders] = True
        return self._traffic_among(leaders, nbytes, by_leaders=True)


def mean_by_machine(stacked: torch.Tensor, local: int) -> torch.Tensor:
    """Return, for each rank, the mean over the ranks of its machine, ``(n, d)``."""
    means = stacked.view(-1, local, stacked.shape[-1]).mean(dim=1)
    return means.repeat_interleave(local, dim=0)
