r"""Buckets of all simulated ranks, on which an algorithm's hooks run.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CompressionUse, JoinedRanks
from asyncddp.algorithms.neighbor_tensors import NeighborTensors
from asyncddp.compression import Compressor
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.simulate.rank_codecs import RankCodecs
from asyncddp.simulate.scenario import Mask
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import NamedFlatBucket

_UNDECLARED = "what single neighbours have sent is for methods that declare by_neighbor = True"


class SimulatedBucket:
    """Flat bucket of all simulated ranks, stacked, on which an algorithm's hooks run.

    Args:
        method: The method.
        bucket: The bucket with the tensors of all ranks, stacked.
        layout: Layout of one rank's tensor.
        compressor: Compressor of what is sent; None for none.
        first: The first round, whose neighbours the method may keep something for; None where it
            does not average with neighbours.
        of_all_ranks: The tensors of all ranks, where the bucket has those of each machine's first.

    Attributes:
        each: The buckets on which hooks run one after the other: that of all ranks, or one a rank.
        codecs: Compressors of all ranks; None where tensors travel as they are.
        of_all_ranks: The tensors of all ranks, ``(n, d)``.
    """

    def __init__(
        self,
        method: Algorithm,
        bucket: AveragedBucket,
        layout: NamedFlatBucket,
        compressor: Compressor | None,
        first: MixingRound | None,
        of_all_ranks: torch.Tensor | None = None,
    ) -> None:
        self.method, self.bucket = method, bucket
        self.of_all_ranks = bucket.flat if of_all_ranks is None else of_all_ranks
        ranks = bucket.nodes = len(bucket.flat)
        self._every = every = len(self.of_all_ranks) // ranks  # from one rank of it to the next
        self._ranks = range(0, every * ranks, every)
        self.codecs = (
            None if compressor is None else RankCodecs(compressor, bucket.index, ranks, every)
        )
        if self.codecs is not None:
            bucket.compressor = self.codecs.each[0]
        self._by_rank = method.by_neighbor and first is not None
        self.each: Sequence[AveragedBucket] = [bucket]
        if self._by_rank:
            self.each = [self._row(place, flat, layout) for place, flat in enumerate(bucket.flat)]
        self._to_each: list[Mapping[int, torch.Tensor] | None] = []
        self._set_weights(first)
        initial = detached_copy(bucket.flat) if self._by_rank else bucket.flat
        for one in self.each:
            neighbors = self._neighbors_of(one, first, lambda place, tensor: initial[place])
            state = method.initial_state(one, neighbors).items()
            one.state.update(
                state if self._by_rank else {key: _by_row(kept, ranks) for key, kept in state}
            )

    def _row(self, place: int, flat: torch.Tensor, layout: NamedFlatBucket) -> AveragedBucket:
        """Make the bucket of one rank."""
        row = AveragedBucket(self.bucket.index, flat, layout, self.bucket.optimizer)
        row.rank, row.nodes = self._ranks[place], self.bucket.nodes
        row.compressor = None if self.codecs is None else self.codecs.each[place]
        return row

    def _set_weights(self, mixing: MixingRound | None) -> None:
        for place, row in enumerate(self.each if self._by_rank else ()):
            row.row = None if mixing is None else mixing.weight_rows[place].between(self._ranks)

    def _neighbors_of(
        self,
        one: AveragedBucket,
        mixing: MixingRound | None,
        kept: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> NeighborTensors:
        """Return the neighbours' tensors: for single ranks, ``kept(place, tensor)``."""
        if not self.method.by_neighbor:
            return _StackedNeighborTensors(one, mixing)
        sources, every = () if one.row is None else one.row.sources, self._every
        there = () if mixing is None else mixing.weight_rows[one.rank // every].sources
        return NeighborTensors(
            one,
            lambda tensor: {
                rank: kept(rank // every, tensor) if rank // every in there else tensor
                for rank in sources
            },
        )

    def restart(
        self,
        planned: MixingRound | None,
        mixing: MixingRound | None,
        new: Collection[int],
        nodes: int,
    ) -> None:
        """Restart the method's state, because the set of participating ranks has changed.

        Args:
            planned: Who averages with whom from now on; None if not with neighbours.
            mixing: The same without ranks that have died meanwhile.
            new: Ranks that have arrived since the last round.
            nodes: Number of members.
        """
        self._set_weights(planned)
        for one in self.each:
            one.nodes = nodes
        flat = self.bucket.flat
        for row in (self.each[rank] for rank in (new if self._by_rank else ())):
            row.vectors.clear()
            near = self._neighbors_of(row, mixing, lambda place, tensor: flat[place])
            row.state = dict(self.method.initial_state(row, near))
        before = [
            {name: kept.clone() for name, kept in _tensors_of(one).items()}
            for one in (self.each if self.method.by_neighbor else ())
        ]
        for one in self.each:
            kept = partial(_counterpart, _tensors_of(one), before)
            self.method.restart(one, self._neighbors_of(one, mixing, kept))

    def admit(self, sponsors: Mapping[int, int]) -> None:
        """Give each rank that arrives the state of its sponsor, or of a rank that begins.

        What neighbours know of each other, and what is owed by error feedback, begins anew.
        """
        method, bucket, new = self.method, self.bucket, list(sponsors)
        follows = method.joined_ranks is JoinedRanks.FOLLOW
        if not self._by_rank and method.compression is CompressionUse.DIFFERENCES and not follows:
            near = self._neighbors_of(bucket, None, lambda place, tensor: tensor)
            for key, kept in method.initial_state(bucket, near).items():
                bucket.state[key][new] = kept[new]
        elif not self._by_rank:
            for kept in bucket.state.values():
                kept[new] = kept[list(sponsors.values())]
        if self.codecs is not None:
            self.codecs.reset(new)

    def begin_round(self, number: int, active: Mask) -> None:
        """Pass the round's number and the ranks that have left to the buckets."""
        for one in self.each:
            one.round, one.joined = number, self._by_rank and not active[one.rank]

    def clear_padding(self) -> None:
        """Write zeros into the padding between parameters, which affects compressors."""
        for one in self.each:
            one.clear_padding()

    def outgoing(self, mixing: MixingRound | None) -> torch.Tensor:
        """Return what all ranks send, ``(n, d)``; give ``mixing`` when sending to neighbours."""
        self._set_weights(mixing)
        sent = [self.method.outgoing(one) for one in self.each]
        differ = mixing is not None and self.method.compression is CompressionUse.DIFFERENCES
        self._to_each = [
            self.method.outgoing_to_each(row, own) if differ and self._by_rank else None
            for row, own in zip(self.each, sent, strict=True)
        ]
        return torch.stack(sent) if self._by_rank else sent[0]

    @property
    def travelling_states(self) -> Mapping[str, torch.Tensor]:
        """State tensors sent along with the bucket, stacked, by name."""
        every = [self.method.travelling_state(one) for one in self.each]
        if not self._by_rank:
            return every[0]
        return {name: torch.stack([one[name] for one in every]) for name in every[0]}

    def incoming(self, arrived: StackedExchangeResult, mixing: MixingRound | None = None) -> None:
        """Update all ranks from the received tensors; give ``mixing`` if from neighbours."""
        if not self._by_rank:
            self.method.incoming(self.bucket, _SimulatedReceived(arrived, slice(None)))
            return
        self._set_weights(mixing)  # without ranks that have died meanwhile
        for place, row in enumerate(self.each):
            terms = {}
            for rank in () if row.row is None else row.row.sources:
                own = self._to_each[rank // self._every]
                terms[rank] = arrived.decoded[rank // self._every] if own is None else own[row.rank]
            received = _SimulatedReceived(arrived, place, terms)
            received.sent_to_each = self._to_each[place] or {}
            self.method.incoming(row, received)


def _tensors_of(one: AveragedBucket) -> Mapping[str, torch.Tensor]:
    """Return a rank's bucket and state tensors by name."""
    return {"": one.flat, **one.state}


def _counterpart(
    own: Mapping[str, torch.Tensor],
    kept: Sequence[Mapping[str, torch.Tensor]],
    place: int,
    tensor: torch.Tensor,
) -> torch.Tensor:
    """Return another rank's tensor that corresponds to one of this rank's tensors."""
    for name, one in own.items():
        if one is tensor:
            return kept[place][name]
    raise TypeError("what neighbours hold is known of bucket.flat and bucket.state, whole")


def _by_row(kept: torch.Tensor, ranks: int) -> torch.Tensor:
    """Expand a scalar to one value per rank; return other tensors unchanged."""
    return kept if kept.dim() else kept.expand(ranks, 1).clone()


@dataclass(frozen=True)
class StackedExchangeResult:
    """Result of exchanging one bucket, stacked over all ranks.

    Attributes:
        decoded: What each rank has sent, as its receivers decode it, ``(n, d)``.
        mixed: Its average on each rank, ``(n, d)``.
        states: The averages of the tensors of the state that travel along, by name.
    """

    decoded: torch.Tensor
    mixed: torch.Tensor
    states: Mapping[str, torch.Tensor]


class _SimulatedReceived(Received):
    """Tensors received by one rank, selected from all sent tensors; or by all ranks, stacked."""

    def __init__(
        self,
        arrived: StackedExchangeResult,
        place: int | slice,
        terms: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._mixed, self._own, self._terms = arrived.mixed[place], arrived.decoded[place], terms
        self.states = {name: one[place] for name, one in arrived.states.items()}
        self.sources = tuple(terms or ())

    @property
    @override
    def mixed(self) -> torch.Tensor:
        return self._mixed

    @override
    def add_to(self, target: torch.Tensor, rank: int, weight: float = 1.0) -> None:
        if self._terms is None:
            raise TypeError(_UNDECLARED)
        target.add_(self._terms[rank], alpha=weight)

    @override
    def add_own_to(self, target: torch.Tensor, weight: float = 1.0) -> None:
        target.add_(self._own, alpha=weight)


class _StackedNeighborTensors(NeighborTensors):
    """Neighbours' copies of tensors, for the stacked tensors of all ranks."""

    def __init__(self, bucket: AveragedBucket, mixing: MixingRound | None) -> None:
        super().__init__(bucket, self._of_each)
        self._mixing = mixing

    @override
    def mixed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._mixing is None else self._mixing.mix(tensor)

    def _of_each(self, tensor: torch.Tensor) -> Mapping[int, torch.Tensor]:
        raise TypeError(_UNDECLARED)
