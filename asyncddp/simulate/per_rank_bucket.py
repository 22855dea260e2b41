"""Bucket of all ranks on which hooks run rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CompressionUse
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.compression import Compressor
from asyncddp.simulate.mixing_round import Mask, MixingRound
from asyncddp.simulate.simulated_bucket import SimulatedBucket, StackedExchangeResult
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import NamedFlatBucket


class PerRankBucket(SimulatedBucket):
    """Bucket on which hooks run rank by rank, for methods that keep something for each neighbour.

    Args:
        method: The method.
        bucket: The bucket with the tensors of all ranks, stacked.
        compressor: Compressor of what is sent; None for none.
        of_all_ranks: The tensors of all ranks, where the bucket has those of each machine's first.
        first: The first round, whose neighbours the method keeps something for.
        layout: Layout of one rank's tensor.
    """

    def __init__(
        self,
        method: Algorithm,
        bucket: AveragedBucket,
        compressor: Compressor | None,
        of_all_ranks: torch.Tensor | None,
        first: MixingRound,
        layout: NamedFlatBucket,
    ) -> None:
        super().__init__(method, bucket, compressor, of_all_ranks)
        stacked, every = detached_copy(bucket.flat), self.every
        self._ranks = range(0, every * len(stacked), every)
        self._rows: list[AveragedBucket] = []
        self._to_each: list[Mapping[int, torch.Tensor] | None] = []
        for place, (rank, flat) in enumerate(zip(self._ranks, bucket.flat, strict=True)):
            row = AveragedBucket(bucket.index, flat, layout, bucket.optimizer)
            row.rank, row.nodes = rank, bucket.nodes
            row.compressor = None if self.codecs is None else self.codecs.each[place]
            row.row = first.weight_rows[place].between(self._ranks)
            near = {one: stacked[one // every] for one in row.row.sources}
            neighbors = NeighborTensors(row, partial(_given, near))
            row.state.update(method.initial_state(row, neighbors))
            self._rows.append(row)

    @override
    def begin_round(self, number: int, active: Mask) -> None:
        super().begin_round(number, active)
        for row in self._rows:
            row.joined = not active[row.rank]

    @override
    def restart(self, mixing: MixingRound | None) -> None:
        self._set_weights(mixing)
        kept = [{name: one.clone() for name, one in _tensors_of(row).items()} for row in self._rows]
        for row in self._rows:
            self.method.restart(row, NeighborTensors(row, partial(self._of_neighbors, row, kept)))

    def _of_neighbors(
        self,
        row: AveragedBucket,
        kept: Sequence[Mapping[str, torch.Tensor]],
        tensor: torch.Tensor,
    ) -> Mapping[int, torch.Tensor]:
        """Return what the neighbours of a rank keep in the place of one of its tensors."""
        for name, one in _tensors_of(row).items():
            if one is tensor and row.row is not None:
                return {rank: kept[rank // self.every][name] for rank in row.row.sources}
        raise TypeError("what neighbours hold is known of bucket.flat and bucket.state, whole")

    def _set_weights(self, mixing: MixingRound | None) -> None:
        for place, row in enumerate(self._rows):
            row.row = None if mixing is None else mixing.weight_rows[place].between(self._ranks)

    @override
    def clear_padding(self) -> None:
        for row in self._rows:
            row.clear_padding()

    @override
    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        self._set_weights(mixing)
        sent = [self.method.outgoing(row) for row in self._rows]
        pairs = zip(self._rows, sent, strict=True)
        alike = mixing is None or self.method.compression is not CompressionUse.DIFFERENCES
        self._to_each = [
            None if alike else self.method.outgoing_to_each(row, one) for row, one in pairs
        ]
        return torch.stack(sent)

    @override
    def incoming(self, arrived: StackedExchangeResult) -> None:
        for place, row in enumerate(self._rows):
            sources = () if row.row is None else row.row.sources
            received = _RowReceived(arrived, place, sources, self._to_each, self.every)
            self.method.incoming(row, received)

    @property
    @override
    def travelling_states(self) -> Mapping[str, torch.Tensor]:
        every = [self.method.travelling_state(row) for row in self._rows]
        return {name: torch.stack([one[name] for one in every]) for name in every[0]}

    @property
    @override
    def each(self) -> Sequence[AveragedBucket]:
        return self._rows


def _tensors_of(row: AveragedBucket) -> Mapping[str, torch.Tensor]:
    """Return what a rank keeps, with its bucket, by name."""
    return {"": row.flat, **row.state}


def _given(
    of_neighbors: Mapping[int, torch.Tensor], tensor: torch.Tensor
) -> Mapping[int, torch.Tensor]:
    """Return what the neighbours have of the tensor that a method's state begins with."""
    return dict(of_neighbors)


class _RowReceived(Received):
    """What one rank has received, out of what all have sent."""

    def __init__(
        self,
        arrived: StackedExchangeResult,
        place: int,
        sources: Sequence[int],
        to_each: Sequence[Mapping[int, torch.Tensor] | None],
        every: int,
    ) -> None:
        self._to_each, self._every = to_each, every
        self._decoded, self._mixed = arrived.decoded, arrived.mixed[place]
        self._place, self.sources = place, sources
        self.sent_to_each = to_each[place] or {}
        self.states = {name: one[place] for name, one in arrived.states.items()}

    @property
    @override
    def mixed(self) -> torch.Tensor:
        return self._mixed

    @override
    def add_to(self, target: torch.Tensor, rank: int, weight: float = 1.0) -> None:
        place = rank // self._every
        own, receiver = self._to_each[place], self._every * self._place
        target.add_(self._decoded[place] if own is None else own[receiver], alpha=weight)

    @override
    def add_own_to(self, target: torch.Tensor, weight: float = 1.0) -> None:
        target.add_(self._decoded[self._place], alpha=weight)
