"""Averaging of all simulated ranks in a round: over neighbours, globally, by push-sum, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import CompressionUse, JoinedRanks
from asyncddp.simulate.mixing_round import MixingRound
from asyncddp.simulate.rank_codecs import RankCodecs
from asyncddp.simulate.scenario import Mask, Numbers, Scenario
from asyncddp.simulate.simulated_bucket import SimulatedBucket, StackedExchangeResult
from asyncddp.tensors.allocation import make_tensor
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.topology import Schedule

_ROUNDS = 64  # of a schedule that are kept


@dataclass
class Traffic:
    """Messages of one round: their number and size, and where they arrive.

    Attributes:
        nbytes: Bytes of the message to a neighbour, or of what is averaged over all.
        mixing: Messages that arrive; None for an average over all ranks.
        copies: How many of them each rank sends, ``(n,)``; of an average over all, a ring's.
        failures: How often each message is sent in vain; None where none is sent again.
        by_leaders: Whether one rank of each machine averages over all for the others.
        number: Index of the round.
    """

    nbytes: float
    mixing: MixingRound | None
    copies: Numbers
    failures: npt.NDArray[np.int64] | None = None
    by_leaders: bool = False
    number: int = 0

    @property
    def bytes_sent(self) -> Numbers:
        """Bytes that each rank sends, ``(n,)``."""
        return self.nbytes * self.copies


class AveragingScheme(ABC):
    """Base class of averaging schemes: average all simulated ranks, round by round.

    Args:
        method: The method.
        ranks: Number of ranks.
        schedule: The graph of each round; None where there is none.
        scenario: Which messages are lost.

    Attributes:
        planned: Messages of the round, and their weights; None if not with neighbours.
        mixing: The same without those that are lost.
        active: The ranks whose tensors are averaged in the round.
        alive: Those that answer in it: all that live.
    """

    def __init__(
        self, method: Algorithm, ranks: int, schedule: Schedule | None, scenario: Scenario
    ) -> None:
        self._method, self._schedule, self._scenario = method, schedule, scenario
        self.planned: MixingRound | None = None
        self.mixing: MixingRound | None = None
        self.active: Mask = np.ones(ranks, dtype=bool)
        self.alive = self.active
        self._number = 0

    def enter(self, schedule: Schedule | None) -> None:
        """Enter another view, with its graph of each round."""
        self._schedule = schedule

    def begin(self, number: int, stays: Mask, alive: Mask) -> None:
        """Begin round ``number``.

        Args:
            number: Its index.
            stays: For each rank, whether it has not departed, as the others know.
            alive: For each rank, whether it lives; who has died is missed in the round.
        """
        self._number, self.active, self.alive = number, stays & alive, alive

    @property
    def biases(self) -> torch.Tensor | None:
        """Push-sum weight of each rank, ``(n,)``; None without push-sum."""
        return None

    @abstractmethod
    def average(self, bucket: SimulatedBucket) -> float:
        """Average one bucket; return the bytes per message."""

    def end(self) -> None:  # noqa: B027 - push-sum weights alone are averaged once for all buckets
        """End the round, after all buckets are averaged."""

    @abstractmethod
    def traffic(self, nbytes: float) -> Traffic:
        """Return the round's traffic, for messages of ``nbytes`` bytes."""


class NeighborAveraging(AveragingScheme):
    """Simulated weighted averaging with neighbours, by messages or synchronised windows.

    Retransmissions change no average; they only cost time and bytes.

    Attributes:
        of_machines: Whether the nodes of the graph are machines.
    """

    of_machines: ClassVar[bool] = False

    def __init__(
        self, method: Algorithm, ranks: int, schedule: Schedule | None, scenario: Scenario
    ) -> None:
        super().__init__(method, ranks, schedule, scenario)
        self.enter(schedule)

    @override
    def enter(self, schedule: Schedule | None) -> None:
        super().enter(schedule)
        self._round_of = lru_cache(maxsize=_ROUNDS)(self._make_round)
        self._round_among = lru_cache(maxsize=_ROUNDS)(self._make_round_among)

    def _make_round(self, number: int) -> MixingRound:
        assert self._schedule is not None
        return MixingRound.of(self._schedule, number)

    def _make_round_among(self, number: int, there: bytes) -> MixingRound:
        """Return a round among the ranks that have not departed, as within ``join``."""
        planned, active = self._round_of(number), np.frombuffer(there, dtype=bool)
        if active.all() or self._method.joined_ranks is JoinedRanks.RELAY:
            return planned
        if self._method.needs.uniform:
            return planned.mean_among(active)
        gone = ~active[planned.sources] | ~active[planned.targets]
        return planned.without(gone, kept_by_sender=self._gives_shares)

    @property
    def _gives_shares(self) -> bool:
        """Return whether the columns of W sum to one, rather than the rows."""
        return self._method.needs.column_stochastic

    def _place(self, number: int) -> int:
        """Return the index of a round in the schedule's period."""
        assert self._schedule is not None
        period = self._schedule.period
        return number if period is None else number % period

    def round_of(self, number: int) -> MixingRound:
        """Return the graph planned for round ``number``."""
        return self._round_of(self._place(number))

    @override
    def begin(self, number: int, stays: Mask, alive: Mask) -> None:
        super().begin(number, stays, alive)
        sent = self.planned = self._round_among(self._place(number), stays.tobytes())
        lost = self._scenario.lost_messages(number, sent.sources)
        if not alive.all():
            lost |= ~(alive[sent.sources] & alive[sent.targets])
        self.mixing = sent.without(lost)

    @override
    def average(self, bucket: SimulatedBucket) -> float:
        mixing, codecs = self.mixing, bucket.codecs
        assert mixing is not None
        if codecs is not None:
            bucket.clear_padding()
        sent = bucket.outgoing(self.planned)
        nbytes = bucket.bucket.message_bytes(1, sent[0], sent.dtype)
        exact, decoded = (sent, sent) if codecs is None else self._encode(codecs, sent)
        mixed = mixing.mix(decoded)
        if codecs is not None and self._method.compression is not CompressionUse.DIFFERENCES:
            own = make_tensor(self._own_weights(mixing), sent.dtype, sent.device).unsqueeze(1)
            mixed += own * (exact - decoded)  # a rank has its own tensor as it is
        states = bucket.travelling_states
        mixed_states = {name: mixing.mix(one) for name, one in states.items()}
        bucket.incoming(StackedExchangeResult(decoded, mixed, mixed_states), mixing)
        return nbytes + _row_bytes(states)

    def _encode(self, codecs: RankCodecs, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the exact tensor of each rank, and its value as decoded by receivers."""
        return sent, codecs.decoded(sent)

    def _own_weights(self, mixing: MixingRound) -> Numbers:
        """Return the weight of each rank's exact own tensor, ``(n,)``."""
        return mixing.own_weights

    @override
    def traffic(self, nbytes: float) -> Traffic:
        assert self.mixing is not None
        assert self.planned is not None
        return self._traffic_of(self.mixing, self.planned.messages_sent, nbytes)

    def _traffic_of(
        self, arriving: MixingRound, sent: npt.NDArray[np.intp], nbytes: float
    ) -> Traffic:
        """Return the traffic of a round, including retransmissions."""
        copies, sources = sent.astype(np.float64), arriving.sources
        failures = self._scenario.failures(self._number, sources, arriving.targets)
        if failures is not None:
            copies += np.bincount(sources, failures, len(copies))
        return Traffic(nbytes, arriving, copies, failures)


class PushSumAveraging(NeighborAveraging):
    """Simulated push-sum: ranks send shares of tensors and of weights to out-neighbours."""

    def __init__(
        self, method: Algorithm, ranks: int, schedule: Schedule | None, scenario: Scenario
    ) -> None:
        self._ranks = ranks
        super().__init__(method, ranks, schedule, scenario)

    @override
    def enter(self, schedule: Schedule | None) -> None:
        super().enter(schedule)
        self._weights = make_tensor([[1.0]] * self._ranks, torch.float64)

    @override
    def _make_round(self, number: int) -> MixingRound:
        return super()._make_round(number).push_round()

    @property
    @override
    def _gives_shares(self) -> bool:
        return True

    @property
    @override
    def biases(self) -> torch.Tensor:
        return self._weights

    @override
    def end(self) -> None:
        assert self.mixing is not None
        self._weights = self.mixing.mix(self._weights)


class GlobalAveraging(AveragingScheme):
    """Simulated average or sum over all ranks that are still in the run.

    Ranks that have departed contribute zeros, as within ``join`` on real ranks; dead ones nothing.
    """

    @override
    def average(self, bucket: SimulatedBucket) -> float:
        codecs = bucket.codecs
        if codecs is not None:
            bucket.clear_padding()
        sent, states = self._given(bucket.outgoing(None)), bucket.travelling_states
        mixed = self._averaged(sent)
        if codecs is not None:
            numel = bucket.bucket.payload.shape[-1]
            mixed = mixed.clone()
            mixed[:, :numel] = self._decoded_average(codecs, sent[:, :numel])
        mixed_states = {name: self._averaged(self._given(one)) for name, one in states.items()}
        bucket.incoming(StackedExchangeResult(sent, mixed, mixed_states))
        parts, wide = self._parts, DTYPES[sent.dtype].accumulate
        return bucket.bucket.message_bytes(parts, sent[0], wide) + _row_bytes(states)

    @override
    def traffic(self, nbytes: float) -> Traffic:
        return self._traffic_among(self.alive, nbytes)

    def _traffic_among(self, senders: Mask, nbytes: float, *, by_leaders: bool = False) -> Traffic:
        """Return the traffic of an allreduce among some ranks, with expected retransmissions."""
        count = int(senders.sum())
        copies = senders.astype(np.float64) * (2 * (count - 1) / count) / (1 - self._scenario.loss)
        return Traffic(nbytes, None, copies, by_leaders=by_leaders, number=self._number)

    @property
    def _parts(self) -> int:
        """Return the number of separately compressed parts of a bucket."""
        return int(self.alive.sum())

    def _decoded_average(self, codecs: RankCodecs, sent: torch.Tensor) -> torch.Tensor:
        """Return the average as decoded by all ranks, ``(d,)``."""
        there = np.flatnonzero(self.alive).tolist()
        return codecs.averaged(sent[there], self.divisor, there)

    @property
    def divisor(self) -> float:
        """Divisor of the sum over all ranks."""
        return float(self.active.sum()) if self._method.average else 1.0

    def _given(self, stacked: torch.Tensor) -> torch.Tensor:
        """Return the contribution of each rank; zeros for ranks that have left."""
        gone = np.flatnonzero(~self.active).tolist()
        if gone:
            stacked = stacked.clone()
            stacked[gone] = 0.0
        return stacked

    def _averaged(self, stacked: torch.Tensor) -> torch.Tensor:
        """Return the average or sum over the contributions, one row per rank."""
        return stacked.sum(dim=0).div_(self.divisor).expand(len(stacked), -1)


class NoAveraging(AveragingScheme):
    """Scheme without averaging, for ranks that train alone.

    A method that changes a rank even so gets the identity as mixing matrix, as on real ranks.
    """

    @override
    def average(self, bucket: SimulatedBucket) -> float:
        if self._method.replicates_model:
            bucket.bucket.flat.copy_(bucket.outgoing(None))
        elif self._method.changes_alone:
            sent = bucket.outgoing(None)
            bucket.incoming(StackedExchangeResult(sent, sent, bucket.travelling_states))
        return 0.0

    @override
    def traffic(self, nbytes: float) -> Traffic:
        raise TypeError("ranks that train alone send nothing")


def _row_bytes(states: Mapping[str, torch.Tensor]) -> int:
    """Count the bytes of one rank's tensors."""
    return sum(one[0].nbytes for one in states.values())
