"""Averaging rounds between machines, in which the first rank of each exchanges for the others."""

from __future__ import annotations

import torch
from typing_extensions import override

from asyncddp.algorithms.averaging_round import (
    BeforeWrite,
    BucketAveragingFunctions,
    CrossRoundState,
    TwoSidedRound,
)
from asyncddp.context.context import use
from asyncddp.ops.allreduce import local_allreduce_
from asyncddp.ops.broadcast import broadcast_
from asyncddp.ops.process_group import ranks_of_machine


class LeaderRound(TwoSidedRound):
    r"""Averaging round of methods that send differences, with machines as the graph's nodes.

    A bucket is averaged over the ranks of a machine, :math:`\bar x_m = \frac1L \sum_{i \in m} x_i`.
    The first rank, which alone keeps the method's state, exchanges it with those of neighbour
    machines, and gives the result to the others, so that all ranks of a machine hold one model.
    """

    def __init__(self, averager: CrossRoundState, plan: BucketAveragingFunctions) -> None:
        super().__init__(averager, plan)
        self._followed: set[int] = set()

    @override
    def start(self, index: int) -> None:
        averager = self._averager
        with averager.exposed_time, use(averager.context), torch.no_grad():
            local_allreduce_(averager.buckets[index].flat)
        if self._plan.leads:
            super().start(index)
        else:
            self._followed.add(index)

    @override
    def has_started(self, index: int) -> bool:
        return index in self._followed or super().has_started(index)

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        averager = self._averager
        if self._plan.leads:
            super().finish_bucket(index, before_write)
        context = averager.context
        with averager.exposed_time, use(context), torch.no_grad():
            machine = ranks_of_machine(context)
            broadcast_(averager.buckets[index].flat, machine.ranks[0], group=machine)
        self._followed.discard(index)

    @override
    def finish(self, before_write: BeforeWrite | None = None) -> None:
        for index in sorted({*self._followed, *self._pending}):
            self.finish_bucket(index, before_write)
        self._averager.round += 1
