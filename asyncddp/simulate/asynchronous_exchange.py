"""Message exchange between simulated asynchronous ranks: contents, arrival, and averaging.

Each class does the work of one communication on real ranks, with messages that are delayed by their
link: puts, gets, shares of push-sum, and pairwise averages by the same protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.simulate.events import SimulatedNetwork
from asyncddp.tensors.allocation import detached_copy, empty_like
from asyncddp.topology import Neighbors, Schedule
from asyncddp.windows.pair_averaging import PairAveraging

Tensors = Sequence[torch.Tensor]
_POLL_SECONDS = 0.001  # until a rank that waits gets from late neighbours again


class AsynchronousExchange(ABC):
    """Base class of averaging between simulated ranks that run asynchronously.

    Args:
        schedule: The graph of each of a rank's rounds.
        network: Carries the messages.
        initial: What each rank has at first, by bucket.
        method: The method, whose rounds exchange one of its fragments each.
        arrived: Called with a rank when something has arrived there.
    """

    bias: Callable[[int], float] | None = None
    """Push-sum weight of a rank, where there is one."""
    tells_all = False
    """True if ranks tell their rounds also to neighbours of other rounds, who may wait for them."""

    def __init__(
        self,
        schedule: Schedule,
        network: SimulatedNetwork,
        initial: Sequence[Tensors],
        method: Algorithm,
        arrived: Callable[[int], None],
    ) -> None:
        self._method, self._fragments = method, method.fragments
        self._schedule, self._network, self._arrived = schedule, network, arrived
        self._clocks = [[0] * schedule.n for _ in initial]
        self.departed: Mapping[int, int] = {}
        self.begin(initial)

    @abstractmethod
    def begin(self, initial: Sequence[Tensors]) -> None:
        """Set up the stored tensors, from the initial tensors of each rank, by bucket."""

    @abstractmethod
    def publish(self, rank: int, number: int, tensors: Tensors) -> None:
        """Begin the rank's round ``number`` and send its tensors, one per bucket."""

    @abstractmethod
    def mix(self, rank: int, number: int) -> Tensors:
        """Average the published with the received tensors, by bucket, and end the round."""

    def late(self, rank: int, number: int, bound: int) -> list[int]:
        """Return the neighbours in this round that lag by more than ``bound`` rounds."""
        wanted, clocks = number + 1 - bound, self._clocks[rank]
        return [j for j in self._sources(rank, number) if clocks[j] < wanted]

    def _sources(self, rank: int, number: int) -> list[int]:
        """Return the in-neighbours of a round that are still in the run."""
        return [j for j in self._near(rank, number).src_weights if j not in self.departed]

    def _near(self, rank: int, number: int) -> Neighbors:
        return self._schedule.neighbors(rank, number)

    def _gone(self, number: int) -> list[int]:
        """Return the ranks that left the run after at most ``number`` rounds."""
        return [rank for rank, rounds in self.departed.items() if rounds <= number]

    def _tell_others(self, rank: int, number: int, told: Sequence[int]) -> None:
        """Tell neighbours of all rounds, except ``told``, this rank's number of rounds."""
        if self.tells_all:
            rounds = range(self._schedule.period or 1)
            every = {peer for k in rounds for peer in self._near(rank, k).dst_ranks}
            arrive = partial(self._hear, source=rank, clock=number + 1)
            self._network.send(rank, sorted(every.difference(told)), 0.0, arrive)

    def _hear(self, rank: int, source: int, clock: int) -> None:
        self._clocks[rank][source] = max(self._clocks[rank][source], clock)
        self._arrived(rank)


def _nbytes(tensors: Tensors) -> int:
    return sum(one.nbytes for one in tensors)


def _mixed(row: WeightRow, own: Tensors, others: Mapping[int, Tensors]) -> Tensors:
    """Return the weighted sums of a rank's own tensors and the tensors received from others."""
    row = row.without([rank for rank in row.src_weights if rank not in others])
    parts = [[others[rank][k] for rank in row.sources] for k, _ in enumerate(own)]
    return [
        row.weighted_sum(tensor, received, empty_like(tensor))
        for tensor, received in zip(own, parts, strict=True)
    ]


class PutExchange(AsynchronousExchange):
    """Exchange by put: a rank averages with the tensors that its neighbours have put last."""

    @override
    def begin(self, initial: Sequence[Tensors]) -> None:
        self._own: list[Tensors] = [list(tensors) for tensors in initial]
        parts = range(self._fragments)
        self._heard: list[list[dict[int, Tensors]]] = [[{} for _ in parts] for _ in initial]
        self._puts = [[Counter[int]() for _ in parts] for _ in initial]

    @override
    def publish(self, rank: int, number: int, tensors: Tensors) -> None:
        self._own[rank] = sent = [detached_copy(one) for one in tensors]
        targets, part = self._near(rank, number).dst_ranks, number % self._fragments

        def arrive(target: int) -> None:
            self._heard[target][part][rank] = sent
            self._puts[target][part][rank] += 1
            self._hear(target, rank, number + 1)

        self._network.send(rank, targets, _nbytes(sent), arrive)
        self._tell_others(rank, number, targets)

    @override
    def mix(self, rank: int, number: int) -> Tensors:
        near, part = self._near(rank, number), number % self._fragments
        row = WeightRow(near.self_weight, near.src_weights, {}).without(self._gone(number))
        if self._method.counts_puts:
            row = row.times(self._puts[rank][part])
            self._puts[rank][part].clear()
        return _mixed(row, self._own[rank], self._heard[rank][part])


class GetExchange(PutExchange):
    """Exchange by get: a rank averages with the newest tensors that its neighbours published.

    A rank that waits for late neighbours repeats answered requests every millisecond.
    """

    @override
    def begin(self, initial: Sequence[Tensors]) -> None:
        super().begin([[detached_copy(one) for one in tensors] for tensors in initial])
        self._published = [0] * len(initial)
        self._requested: list[set[int]] = [set() for _ in initial]

    @override
    def publish(self, rank: int, number: int, tensors: Tensors) -> None:
        self._own[rank] = [detached_copy(one) for one in tensors]
        self._published[rank] = number + 1
        self._request(rank, self._sources(rank, number))

    @override
    def late(self, rank: int, number: int, bound: int) -> list[int]:
        found = super().late(rank, number, bound)
        if found:
            soon = self._network.queue.now + _POLL_SECONDS
            self._network.queue.schedule(soon, partial(self._request, rank, found))
        return found

    def _request(self, rank: int, sources: Sequence[int]) -> None:
        """Request tensors from the given ranks, unless a request is pending."""
        pending = self._requested[rank]
        wanted = [j for j in sources if j not in pending and j not in self.departed]
        pending.update(wanted)
        pending.difference_update(self._network.send(rank, wanted, 0.0, partial(self._reply, rank)))

    def _reply(self, rank: int, source: int) -> None:
        found, clock = self._own[source], self._published[source]

        def arrive(target: int) -> None:
            self._requested[target].discard(source)
            self._heard[target][0][source] = found
            self._hear(target, source, clock)

        lost = self._network.send(source, [rank], _nbytes(found), arrive)
        self._requested[rank].difference_update([source] if lost else [])


class PushSumExchange(AsynchronousExchange):
    """Exchange by push-sum: each share of a tensor and of its push-sum weight arrives once.

    A neighbour that has not collected the last share yet gets no other.
    """

    @override
    def begin(self, initial: Sequence[Tensors]) -> None:
        self._p = [1.0] * len(initial)
        self.bias = self._p.__getitem__
        self._own: list[Tensors] = [list(tensors) for tensors in initial]
        self._shares: list[list[tuple[int, Tensors, float]]] = [[] for _ in initial]
        self._unread: set[tuple[int, int]] = set()

    @override
    def publish(self, rank: int, number: int, tensors: Tensors) -> None:
        targets = self._near(rank, number).dst_ranks
        share, gone = 1.0 / (len(targets) + 1), self._gone(number)
        there = [one for one in targets if one not in gone]
        given = [one for one in there if (rank, one) not in self._unread]
        sent, p = [one * share for one in tensors], self._p[rank] * share

        def arrive(target: int) -> None:
            self._shares[target].append((rank, sent, p))
            self._hear(target, rank, number + 1)

        self._unread.update((rank, target) for target in given)
        lost = self._network.send(rank, given, _nbytes(sent), arrive)
        self._unread.difference_update((rank, target) for target in lost)  # they are gone for good
        self._tell_others(rank, number, given)
        kept = 1.0 - share * len(given)
        self._own[rank] = [one * kept for one in tensors]
        self._p[rank] *= kept

    @override
    def mix(self, rank: int, number: int) -> Tensors:
        totals = self._own[rank]
        for source, tensors, p in self._shares[rank]:
            for total, one in zip(totals, tensors, strict=True):
                total.add_(one)
            self._p[rank] += p
            self._unread.discard((source, rank))
        self._shares[rank] = []
        return totals


class PairExchange(AsynchronousExchange):
    """Exchange in pairs: averages of two ranks at a time, each atomic, as on real ranks.

    The protocol is :class:`asyncddp.windows.pair_averaging.PairAveraging`.
    """

    @override
    def begin(self, initial: Sequence[Tensors]) -> None:
        self._pairs = [
            [
                PairAveraging(
                    partial(self._send, rank, k),
                    lambda peer: peer in self.departed,
                    lambda: self._network.queue.now,
                )
                for k, _ in enumerate(tensors)
            ]
            for rank, tensors in enumerate(initial)
        ]

    def _send(
        self,
        rank: int,
        bucket: int,
        peer: int,
        word: str,
        ticket: int,
        weight: float,
        tensor: torch.Tensor | None,
    ) -> None:
        def arrive(target: int) -> None:
            if target not in self.departed:
                self._pairs[target][bucket].receive(rank, word, ticket, weight, tensor)

        self._network.send(rank, [peer], 0.0 if tensor is None else tensor.nbytes, arrive)

    @override
    def publish(self, rank: int, number: int, tensors: Tensors) -> None:
        partners = self._near(rank, number).src_weights
        for pair, tensor in zip(self._pairs[rank], tensors, strict=True):
            pair.begin(tensor)
            for peer, weight in partners.items():
                if peer > rank:
                    pair.ask(peer, weight)

    @override
    def mix(self, rank: int, number: int) -> Tensors:
        return [pair.end() for pair in self._pairs[rank]]


EXCHANGES: dict[str, type[AsynchronousExchange]] = {
    "pair_average": PairExchange,
    "win_accumulate": PushSumExchange,
    "win_get": GetExchange,
    "win_put": PutExchange,
}
"""Exchange by the name of the communication."""
