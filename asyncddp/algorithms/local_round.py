"""Averaging rounds of a rank that averages with nobody."""

from __future__ import annotations

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import ReceivedAverage
from asyncddp.algorithms.averaging_round import AveragingRound, BeforeWrite, CrossRoundState


class LocalRound(AveragingRound):
    """Averaging round of a rank that averages with nobody: W is one."""

    def __init__(self, averager: CrossRoundState) -> None:
        self._averager = averager
        self._sent: dict[int, ReceivedAverage] = {}

    @override
    def start(self, index: int) -> None:
        method, bucket = self._averager.algorithm, self._averager.buckets[index]
        if method.takes_part(bucket):
            with torch.no_grad():
                self._sent[index] = ReceivedAverage(method.outgoing(bucket))
                self._sent[index].states = method.travelling_state(bucket)

    @override
    def has_started(self, index: int) -> bool:
        return index in self._sent

    @override
    def finish_bucket(self, index: int, before_write: BeforeWrite | None = None) -> None:
        if before_write is not None:
            before_write(index)
        method, bucket = self._averager.algorithm, self._averager.buckets[index]
        with torch.no_grad():
            method.incoming(bucket, self._sent.pop(index))

    @override
    def finish(self, before_write: BeforeWrite | None = None) -> None:
        for index in list(self._sent):
            self.finish_bucket(index, before_write)
        self._averager.round += 1
