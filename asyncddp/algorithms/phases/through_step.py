"""Communication phase that averages copies of the parameters across whole optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.phases.communication_phase import Closure, ParameterAveragingPhase, Update
from asyncddp.algorithms.phases.overlapped import OverlappedPhase
from asyncddp.tensors.allocation import empty_like


class ThroughStepPhase(OverlappedPhase):
    r"""Communication phase of ``async_model_average``: averages copies while training goes on.

    The first forward pass in training mode after an averaging sends a copy s of the parameters x,
    or else ``step()`` does. Steps go on updating x; then the change of the copy is added:

    .. math:: x \leftarrow (x - s) + \mathrm{mix}(s)
    """

    _copies: Sequence[torch.Tensor] = ()
    _copied_buckets: Sequence[object] | None = None

    def flat_tensors(self) -> list[torch.Tensor]:
        """Return the copies of the buckets, which have memory of their own."""
        if self._copied_buckets is not self.buckets:
            self._copies = [empty_like(bucket.flat) for bucket in self.buckets]
            self._copied_buckets = self.buckets
        return list(self._copies)

    def _should_start_round(self) -> bool:
        return True

    def _end_skipped_step(self) -> None:
        due = self.accumulation.due()
        self._end_step(averaged=due and self._finish_round())

    @override
    def _averages_in_step(self) -> bool:
        return self.accumulation.due()

    @override
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        if self._round is None:
            self._start_round()
        loss = update(closure)
        if averaged:
            self._finish_round()
        return loss

    @override
    def _start_round(self) -> None:
        self.rebuild_if_changed()
        self._round = self.config.averager.begin_round()
        if self._round is None:
            return
        for index, (bucket, copy) in enumerate(zip(self.buckets, self.flat_tensors(), strict=True)):
            copy.copy_(bucket.flat)
            self._round.start(index, copy)

    def _finish_round(self) -> bool:
        """Add the change by averaging, if a round is pending; return whether there was one."""
        pending_round, buckets, self._round = self._round, self.buckets, None
        self.rebuild_if_changed()
        if pending_round is None or self.buckets is not buckets:  # it was a round of other buckets
            return False
        pairs = list(zip(buckets, self.flat_tensors(), strict=True))
        for bucket, copy in pairs:
            bucket.flat.sub_(copy)
        try:
            pending_round.finish()
        finally:
            for bucket, copy in pairs:
                bucket.flat.add_(copy)
        return True

    wait_for_reads = ParameterAveragingPhase.wait_for_reads  # parameters are never read: may change
