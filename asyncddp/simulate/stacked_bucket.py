r"""Buckets of all ranks, on which a method's hooks run: once for all, or once for each rank.

The contract between hooks and simulation
-----------------------------------------

A hook treats each element by itself, as :class:`asyncddp.algorithms.Algorithm` asks for:
``outgoing``, ``incoming`` and the rest are sums and products of tensors of the bucket's size and of
what it receives, with the same factors on all ranks. So they run unchanged on stacked tensors:
``bucket.flat`` is ``(n, d)``, one row a rank, and so is each tensor of ``bucket.state``,
``bucket.gradient()`` and ``received.mixed``. A state that is one number a rank, such as a push-sum
weight, is ``(n, 1)``.

A method that looks at what single neighbours have sent, or keeps something for each, is not of that
kind, and says so by ``by_neighbor``. Its hooks are called for one rank after the other, with the
rank's row of the stacked tensors as the bucket, its weights as ``bucket.row``, and what its
neighbours sent in ``received``, as on real ranks.

A compressor encodes each rank's row by itself, in both cases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CompressionUse
from asyncddp.compression import Compressor
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.simulate.rank_codecs import RankCodecs
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import NamedFlatBucket


class SimulatedBucket(ABC):
    """One bucket of all ranks, and the hooks of a method on it (base class).

    Args:
        method: The method.
        bucket: The bucket with the tensors of all ranks, stacked.
        compressor: Compressor of what is sent; None for none.
        of_all_ranks: The tensors of all ranks, where the bucket has those of each machine's first.

    Attributes:
        codecs: Compressors of all ranks; None where tensors travel as they are.
        of_all_ranks: The tensors of all ranks, ``(n, d)``.
        every: From one rank of the bucket to the next.
    """

    def __init__(
        self,
        method: Algorithm,
        bucket: AveragedBucket,
        compressor: Compressor | None,
        of_all_ranks: torch.Tensor | None = None,
    ) -> None:
        self.method, self.bucket = method, bucket
        self.of_all_ranks = bucket.flat if of_all_ranks is None else of_all_ranks
        ranks = bucket.nodes = len(bucket.flat)
        self.every = len(self.of_all_ranks) // ranks
        self.codecs = (
            None if compressor is None else RankCodecs(compressor, bucket.index, ranks, self.every)
        )
        if self.codecs is not None:
            bucket.compressor = self.codecs.each[0]

    @abstractmethod
    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        """Return what all ranks send, ``(n, d)``; ``mixing`` if it goes to neighbours."""

    @abstractmethod
    def incoming(self, arrived: StackedExchangeResult) -> None:
        """Update all ranks from what has arrived."""

    @property
    def travelling_states(self) -> Mapping[str, torch.Tensor]:
        """Tensors that travel along, stacked, by name."""
        return self.method.travelling_state(self.bucket)

    @property
    def each(self) -> Sequence[AveragedBucket]:
        """Return the buckets on which hooks run one after the other."""
        return [self.bucket]

    def clear_padding(self) -> None:
        """Write zeros between parameters, of which compressors would lose something."""
        self.bucket.clear_padding()


@dataclass(frozen=True)
class StackedExchangeResult:
    """What the exchange of one bucket has brought to all ranks.

    Attributes:
        decoded: What each rank has sent, as its receivers decode it, ``(n, d)``.
        mixed: Its average on each rank, ``(n, d)``.
        states: The averages of the tensors of the state that travel along, by name.
        mixing: Who averages with whom; None if not with neighbours.
    """

    decoded: torch.Tensor
    mixed: torch.Tensor
    states: Mapping[str, torch.Tensor]
    mixing: MixingRound | None


_UNDECLARED = "what single neighbours have sent is for methods that declare by_neighbor = True"


class StackedBucket(SimulatedBucket):
    """Bucket on which hooks run once, for all ranks."""

    @override
    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        return self.method.outgoing(self.bucket)

    @override
    def incoming(self, arrived: StackedExchangeResult) -> None:
        self.method.incoming(self.bucket, _StackedReceived(arrived))


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
            near = {every * one: stacked[one] for one in first.weight_rows[place].sources}
            row.state.update(method.initial_state(row, partial(_given, near)))
            self._rows.append(row)

    @override
    def clear_padding(self) -> None:
        for row in self._rows:
            row.clear_padding()

    @override
    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        for place, row in enumerate(self._rows):
            row.row = None if mixing is None else mixing.weight_rows[place].between(self._ranks)
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

    def neighbors(tensor: torch.Tensor) -> Mapping[int, torch.Tensor]:
        if not method.by_neighbor:
            raise TypeError(_UNDECLARED)
        return {}

    state = dict(method.initial_state(bucket, neighbors))
    ranks = len(bucket.flat)
    bucket.state.update(
        {key: one if one.dim() else one.expand(ranks, 1).clone() for key, one in state.items()}
    )
    return StackedBucket(method, bucket, compressor, of_all_ranks)
