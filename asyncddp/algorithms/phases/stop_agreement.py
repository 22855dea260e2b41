"""Agreement of all ranks on the round after which they stop averaging in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.method_traits import CommunicationPattern
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.neighbor_exchange import exchange_with_neighbors_nonblocking
from asyncddp.ops.unordered_average import unordered_average_nonblocking
from asyncddp.tensors.allocation import make_tensor


class StopAgreement(ABC):
    """Base class of agreements on a common last round: ranks exchange stop requests in each round.

    Ranks send their requests with each round.

    Attributes:
        asked: Whether this rank has asked to stop.
    """

    _handle: Handle[Any]

    def __init__(self, averager: ModelAverager) -> None:
        self._averager, self._name = averager, f"{averager.label}.stop"
        self.asked = False

    @abstractmethod
    def start(self) -> None:
        """Start sending this rank's stop request, with the start of a round."""

    @property
    def is_complete(self) -> bool:
        """True if the other ranks' requests of this round have arrived."""
        return self._handle.poll()

    @abstractmethod
    def finish(self) -> bool:
        """Wait for the other ranks' requests; return whether this round is the last."""


class GlobalStopAgreement(StopAgreement):
    """Stop agreement by allreduce: the last round is the first in which all ranks ask to stop."""

    @override
    def start(self) -> None:
        with use(self._averager.context):
            flag = make_tensor(float(self.asked), torch.float64)
            self._handle = unordered_average_nonblocking(flag, name=self._name)

    @override
    def finish(self) -> bool:
        return bool(self._handle.wait() == 1.0)


class NeighborStopAgreement(StopAgreement):
    r"""Stop agreement between neighbours: once all ranks ask to stop, all stop in the same round.

    .. math:: c_i \leftarrow 1 + \min(c_i, \min_j c_j) \text{ if rank i has asked, else } 0

    over in-neighbours j. Let d be a number of rounds in which news of each rank reaches all ranks.
    Then no :math:`c_i` exceeds d before all have asked, and d rounds later all are equal, so that
    all exceed d in the same round.
    """

    def __init__(self, averager: ModelAverager) -> None:
        super().__init__(averager)
        self._count = 0

    @override
    def start(self) -> None:
        context, schedule = self._averager.context, self._averager.schedule_of_ranks
        near = schedule.neighbors(context.rank, self._averager.round)
        row = WeightRow(near.self_weight, near.src_weights, dict.fromkeys(near.dst_ranks, 1.0))
        count = make_tensor([self._count], torch.int64)
        self._limit = (schedule.n - 1) * (schedule.period or schedule.n)
        self._asked_then = self.asked
        with use(context):
            self._handle = exchange_with_neighbors_nonblocking(count, row, None, name=self._name)

    @override
    def finish(self) -> bool:
        others = [int(count) for count in self._handle.wait().received.values()]
        self._count = 1 + min([self._count, *others]) if self._asked_then else 0
        return self._count > self._limit


def stop_agreement_for(averager: ModelAverager) -> StopAgreement:
    """Create the stop agreement for an averager's communication."""
    if averager.communication.how is CommunicationPattern.GLOBAL:
        return GlobalStopAgreement(averager)
    return NeighborStopAgreement(averager)
