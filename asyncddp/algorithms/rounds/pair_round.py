"""Averaging rounds of atomic pairwise averages, in which ranks do not wait for each other."""

from __future__ import annotations

import time
from functools import partial

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received
from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.rounds.averaging_round import (
    AveragerState,
    AveragingRound,
    BeforeWrite,
    BucketExchange,
)
from asyncddp.algorithms.rounds.bucket_windows import as_real, received_like
from asyncddp.context.context import use
from asyncddp.ops.barrier import barrier
from asyncddp.windows.pair_averaging import PairAveraging
from asyncddp.windows.pair_averaging_service import pair_averaging_of


class PairRound(AveragingRound):
    r"""Asynchronous averaging round, in which a rank averages atomically with one other rank.

    .. math:: (x_i, x_j) \leftarrow \big(x_i - w (x_i - x_j),\ x_j + w (x_i - x_j)\big)

    atomically, while both compute gradients: see :mod:`asyncddp.windows.pair_averaging`. The lower
    rank of a pair sends the request. If the other rank does not answer within the step, there is no
    average. With ``force_barrier`` all ranks synchronise in each round.
    """

    name = "pair_average"
    how = CommunicationPattern.PAIR
    asynchronous = True
    nodes = "ranks"

    def __init__(self, averager: AveragerState, number: int) -> None:
        super().__init__(averager, number)
        rank = averager.context.rank
        partners = averager.schedule_of_ranks.neighbors(rank, number).src_weights
        self._partners = {peer: weight for peer, weight in partners.items() if peer > rank}
        self._service = pair_averaging_of(averager.context)

    @override
    @classmethod
    def prepare(cls, averager: AveragerState) -> None:
        averager.windows.ensure_pairs_created()

    @override
    @classmethod
    def begin(cls, averager: AveragerState, number: int) -> AveragingRound | None:
        cls.prepare(averager)
        if not averager.force_barrier:
            averager.windows.count_step()
        return cls(averager, number)

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        averager = self._averager
        with use(averager.context), torch.no_grad():
            sent = as_real(averager.algorithm.outgoing(bucket))
            self._service.progress()
            with averager.context.engine.active_messages():
                self._pair(bucket.index).begin(sent)
                if not averager.force_barrier:
                    self._ask(bucket.index)
        return BucketExchange(partial(self._end, bucket))

    def _pair(self, index: int) -> PairAveraging:
        return self._averager.windows.pairs[index]

    def _ask(self, index: int) -> None:
        for peer, weight in self._partners.items():
            self._pair(index).ask(peer, weight)

    def _end(self, bucket: AveragedBucket) -> Received:
        """Close the averaging of a bucket, and return its averaged values."""
        averager, pair, begun = self._averager, self._pair(bucket.index), time.monotonic_ns()
        with use(averager.context), averager.context.engine.active_messages():
            mixed = pair.end()
            averager.bytes_sent += pair.sent * mixed.nbytes
            peers, pair.peers, pair.sent = pair.peers, [], 0
        tracer = averager.context.engine.tracer
        if tracer is not None:
            name = averager.bucket_name(bucket.index)
            facts = {"name": name, "bytes": mixed.nbytes, "peers": peers}
            tracer.record_span("window", "PAIR_AVERAGE", begun, time.monotonic_ns(), facts)
        return received_like(bucket.flat, mixed.to(bucket.flat.device))

    @override
    def _before_averages(self, before_write: BeforeWrite | None) -> None:
        averager = self._averager
        with averager.exposed_time, use(averager.context):
            self._service.progress()
            if averager.force_barrier:
                self._synchronize()

    def _synchronize(self) -> None:
        """Average with the partner of this round between two barriers."""
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
