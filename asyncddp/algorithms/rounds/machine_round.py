"""Averaging rounds between machines, after the ranks of each machine have averaged."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import CommunicationPattern, CompressionUse
from asyncddp.algorithms.rounds.averaging_round import AveragerState, BucketExchange
from asyncddp.algorithms.rounds.message_round import MessageRound
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import local_allreduce_
from asyncddp.ops.broadcast import broadcast_
from asyncddp.ops.hierarchical_neighbor_allreduce import (
    average_by_machine_row_nonblocking,
    machine_schedule,
    require_whole_machines,
)
from asyncddp.ops.process_group import ranks_of_machine


class MachineRound(MessageRound):
    """Hierarchical average by messages: mean per machine, then weighted average of machines."""

    name = "hierarchical_neighbor_allreduce"
    how = CommunicationPattern.MACHINES
    nodes = "machines"
    override_names = ("self_weight", "src_machine_weights", "dst_machine_weights")

    @override
    @classmethod
    def of(
        cls, averager: AveragerState, number: int, active: Collection[int] | None = None
    ) -> MessageRound:
        sends_differences = averager.algorithm.compression is CompressionUse.DIFFERENCES
        return (LeaderRound if sends_differences else cls)(averager, number, active)

    @override
    def _plan(self) -> None:
        self._machine_row, local = self._row_of_machine(), self._averager.context.local_size
        self.copies_sent = (3 * (local - 1) + len(self._machine_row.dst_weights)) / local

    def _row_of_machine(self) -> WeightRow:
        """Return the weights of this machine."""
        context = self._averager.context
        require_whole_machines(context)
        by_hand = self._averager.overrides.dst_machine_weights is not None
        schedule = self._averager.schedule or machine_schedule(context, by_hand=by_hand)
        return self._resolved_row(schedule, context.machine_rank)

    @override
    def _average(self, tensor: torch.Tensor, **options: Any) -> Handle[torch.Tensor]:
        return average_by_machine_row_nonblocking(tensor, self._machine_row, **options)


class LeaderRound(MachineRound):
    r"""Averaging round between the machines' first ranks, for algorithms that send differences.

    A bucket is averaged over the ranks of a machine, :math:`\bar x_m = \frac1L \sum_{i \in m} x_i`.
    The machine's first rank, which alone keeps the method's state, exchanges it with the first
    ranks of neighbour machines, and broadcasts the result, so that all ranks of a machine hold one
    model.
    """

    sums = False

    @override
    def _plan(self) -> None:
        context = self._averager.context
        self.leads = context.local_rank == 0
        leaders = [members[0] for members in context.machines.members]
        self.row = self._row_of_machine().between(leaders)
        self.copies_sent = len(self.row.dst_weights) if self.leads else 0

    @override
    def _send(self, bucket: AveragedBucket) -> BucketExchange:
        with use(self._averager.context), torch.no_grad():
            local_allreduce_(bucket.flat)
        exchange = super()._send(bucket) if self.leads else None
        handles = () if exchange is None else exchange.handles
        return BucketExchange(partial(self._share, bucket, exchange), handles)

    def _share(self, bucket: AveragedBucket, exchange: BucketExchange | None) -> None:
        """Write the average on the first rank, and broadcast it to all ranks of the machine."""
        averager = self._averager
        received = None if exchange is None else exchange.wait()
        if received is not None:
            averager.algorithm.incoming(bucket, received)
        with use(averager.context):
            machine = ranks_of_machine(averager.context)
            broadcast_(bucket.flat, machine.ranks[0], group=machine)
