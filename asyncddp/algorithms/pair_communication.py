"""Atomic averages in pairs, by which ranks of any speed mix without waiting for each other."""

from __future__ import annotations

import time

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import ReceivedAverage
from asyncddp.algorithms.averaging_round import AveragingRound, BeforeWrite, CrossRoundState
from asyncddp.algorithms.bucket_windows import as_real
from asyncddp.algorithms.communication import Communication
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.context.context import use
from asyncddp.ops.barrier import barrier
from asyncddp.windows.pair_averaging import PairAveraging
from asyncddp.windows.pair_averaging_service import pair_averaging_of


class PairAverageCommunication(Communication):
    r"""Asynchronous averages in pairs: in its own round k a rank meets its partner of that round.

    .. math:: (x_i, x_j) \leftarrow \big(x_i - w (x_i - x_j),\ x_j + w (x_i - x_j)\big)

    at once on both, while they compute gradients: see :mod:`asyncddp.windows.pair_averaging`. The
    lower rank of a pair asks. It goes without that average where the other one does not answer
    within the step. With ``force_barrier`` all ranks meet in each round.
    """

    name = "pair_average"
    how = CommunicationPattern.PAIR
    asynchronous = True
    nodes = "ranks"

    @override
    def prepare(self, averager: CrossRoundState) -> None:
        averager.windows.ensure_pairs_created()

    @override
    def begin_round(self, averager: CrossRoundState, number: int) -> AveragingRound | None:
        self.prepare(averager)
        near = averager.schedule_of_ranks.neighbors(averager.context.rank, number)
        if not averager.force_barrier and averager.windows.step_rates is not None:
            averager.windows.step_rates.count()
        return PairRound(averager, near.src_weights)


class PairRound(AveragingRound):
    """Round of a rank that lets others average with it, and asks its partner if it is the lower."""

    def __init__(self, averager: CrossRoundState, partners: dict[int, float]) -> None:
        self._averager, rank = averager, averager.context.rank
        self._partners = {peer: weight for peer, weight in partners.items() if peer > rank}
        self._service = pair_averaging_of(averager.context)
        self._started: set[int] = set()

    @override
    def start(self, index: int) -> None:
        averager = self._averager
        with averager.exposed_time, use(averager.context), torch.no_grad():
            sent = as_real(averager.algorithm.outgoing(averager.buckets[index]))
            self._service.progress()
            with averager.context.engine.active_messages():
                self._pair(index).begin(sent)
                if not averager.force_barrier:
                    self._ask(index)
        self._started.add(index)

    def _pair(self, index: int) -> PairAveraging:
        return self._averager.windows.pairs[index]

    def _ask(self, index: int) -> None:
        for peer, weight in self._partners.items():
            self._pair(index).ask(peer, weight)

    @override
    def has_started(self, index: int) -> bool:
        return index in self._started

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        averager, bucket = self._averager, self._averager.buckets[index]
        begun = time.monotonic_ns()
        with averager.exposed_time, use(averager.context), torch.no_grad():
            if before_write is not None:
                before_write(index)
            pair = self._pair(index)
            with averager.context.engine.active_messages():
                mixed = pair.end()
                averager.bytes_sent += pair.sent * mixed.nbytes
                peers, pair.peers, pair.sent = pair.peers, [], 0
            mixed = mixed.to(bucket.flat.device)
            mixed = torch.view_as_complex(mixed) if bucket.flat.is_complex() else mixed
            averager.algorithm.incoming(bucket, ReceivedAverage(mixed))
        self._started.discard(index)
        tracer = averager.context.engine.tracer
        if tracer is not None:
            facts = {"name": averager.bucket_name(index), "bytes": mixed.nbytes, "peers": peers}
            tracer.record_span("window", "PAIR_AVERAGE", begun, time.monotonic_ns(), facts)

    @override
    def finish(self, before_write: BeforeWrite | None = None) -> None:
        averager = self._averager
        with averager.exposed_time, use(averager.context):
            self._service.progress()
            if averager.force_barrier:
                self._meet()
        for index in sorted(self._started):
            self.finish_bucket(index, before_write)
        averager.round += 1

    def _meet(self) -> None:
        """Average with the partner of this round, when all ranks are there."""
        averager = self._averager
        barrier()
        with averager.context.engine.active_messages():
            for index in self._started:
                self._ask(index)

        def missing() -> list[int]:
            asked = {self._pair(index).waits_for for index in self._started}
            return sorted(peer for peer in asked if peer is not None)

        what = f"average {averager.round} of {averager.label} with force_barrier"
        averager.context.engine.wait_until(lambda: not missing(), what, missing)
        barrier()
