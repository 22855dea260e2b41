"""Bucket of all ranks on which hooks run once, and the choice of the kind of bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.compression import Compressor
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.simulate.per_rank_bucket import PerRankBucket
from asyncddp.simulate.simulated_bucket import SimulatedBucket, StackedExchangeResult
from asyncddp.tensors.buckets import NamedFlatBucket

_UNDECLARED = "what single neighbours have sent is for methods that declare by_neighbor = True"


class StackedBucket(SimulatedBucket):
    """Bucket on which hooks run once, for all ranks."""

    @override
    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        return self.method.outgoing(self.bucket)

    @override
    def incoming(self, arrived: StackedExchangeResult) -> None:
        self.method.incoming(self.bucket, _StackedReceived(arrived))

    @override
    def restart(self, mixing: MixingRound | None) -> None:
        self.method.restart(self.bucket, _StackedNeighborTensors(self.bucket, mixing))


class _StackedReceived(Received):
    """What all ranks have received, stacked."""

    def __init__(self, arrived: StackedExchangeResult) -> None:
        self._decoded, self._mixed, self.states = arrived.decoded, arrived.mixed, arrived.states

    @property
    @override
    def mixed(self) -> torch.Tensor:
        return self._mixed

    @override
    def add_to(self, target: torch.Tensor, rank: int, weight: float = 1.0) -> None:
        raise TypeError(_UNDECLARED)

    @override
    def add_own_to(self, target: torch.Tensor, weight: float = 1.0) -> None:
        target.add_(self._decoded, alpha=weight)


class _StackedNeighborTensors(NeighborTensors):
    """What neighbours have of all ranks' stacked tensors."""

    def __init__(self, bucket: AveragedBucket, mixing: MixingRound | None) -> None:
        super().__init__(bucket, self._of_each)
        self._mixing = mixing

    @override
    def mixed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._mixing is None else self._mixing.mix(tensor)

    def _of_each(self, tensor: torch.Tensor) -> Mapping[int, torch.Tensor]:
        raise TypeError(_UNDECLARED)


def bucket_of_ranks(
    method: Algorithm,
    bucket: AveragedBucket,
    layout: NamedFlatBucket,
    compressor: Compressor | None,
    first: MixingRound | None,
    of_all_ranks: torch.Tensor | None = None,
) -> SimulatedBucket:
    """Make the bucket of all ranks, with the method's state, for the kind of hooks that it has."""
    if method.by_neighbor and first is not None:
        return PerRankBucket(method, bucket, compressor, of_all_ranks, first, layout)
    alone = NeighborTensors(bucket, lambda tensor: {})
    neighbors = alone if method.by_neighbor else _StackedNeighborTensors(bucket, first)
    state = dict(method.initial_state(bucket, neighbors))
    ranks = len(bucket.flat)
    bucket.state.update(
        {key: one if one.dim() else one.expand(ranks, 1).clone() for key, one in state.items()}
    )
    return StackedBucket(method, bucket, compressor, of_all_ranks)
