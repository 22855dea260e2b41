"""Communication phase that averages copies of parameters at time intervals, in the background."""

from __future__ import annotations

import time
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.phases.communication_phase import Closure, PhaseConfig, Update
from asyncddp.algorithms.phases.overlapped import BackgroundAveragingPhase
from asyncddp.algorithms.phases.stop_agreement import stop_agreement_for
from asyncddp.context.context import use
from asyncddp.ops.allreduce import allreduce
from asyncddp.tensors.allocation import make_tensor


class TimeIntervalPhase(BackgroundAveragingPhase):
    r"""Phase of ``async_model_average`` with ``sync_interval_ms``: averages at time intervals.

    Between two steps a round sends copies s of the parameters x, once the interval has passed since
    the last round. Training continues, and between two later steps, when the round is complete,

    .. math:: x \leftarrow x + (\mathrm{mix}(s) - s)

    All ranks take part in the same rounds, and make steps at their own pace: a round lasts until
    the slowest rank has ended a step, but no rank waits for it. Rounds continue until all ranks
    have called :meth:`abort`.
    """

    needs_gradient_hooks = False
    hooks_forward = False

    def __init__(self, config: PhaseConfig) -> None:
        config.averager.overlapping = True  # no round is averaged by a call that waits
        self._interval: float = config.averager.algorithm.sync_interval_ms / 1000  # type: ignore[attr-defined]
        self._running, self._round_end = True, time.monotonic()
        self._agreement = stop_agreement_for(config.averager)
        super().__init__(config)

    @override
    def _averages_in_step(self) -> bool:
        return False

    @override
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        loss = update(closure)
        if self._running and not self.config.averager.single_rank:
            self._advance()
        return loss

    def _advance(self) -> None:
        """Finish the round if it is complete, and start the next one if it is due."""
        if self._round is not None and self._round.is_complete and self._agreement.is_complete:
            self._finish_round()
        due = time.monotonic() >= self._round_end + self._interval
        if self._round is None and due:
            self._start_round()

    @override
    def _start_round(self) -> None:
        super()._start_round()
        self._agreement.start()

    @override
    def _finish_round(self) -> bool:
        last = self._agreement.finish()
        finished = super()._finish_round()
        self._running, self._round_end = not last, time.monotonic()
        return finished

    @override
    def abort(self) -> None:
        if self.config.averager.single_rank:
            return
        self._agreement.asked = True
        while self._running:
            if self._round is None:
                self._start_round()
            self._finish_round()

    @override
    def resume(self) -> None:
        if not self._running:
            self._agreement = stop_agreement_for(self.config.averager)
            self._running = True

    @override
    def round_to_resume(self, saved: int) -> int:
        """Agree on the maximum over ranks, since ranks save between different rounds."""
        with use(self.config.averager.context):
            latest = allreduce(make_tensor(saved, torch.int64), op="max")
        return int(latest)

    @override
    def conclude(self) -> None:
        self.abort()

    @override
    def reset(self) -> None:
        running = self._running
        self.abort()
        super().reset()
        if running:
            self.resume()
