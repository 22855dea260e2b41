"""Communication phases that overlap averaging with forward and backward passes, or with steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from asyncddp.algorithms.phases.communication_phase import Closure, Update
from asyncddp.algorithms.phases.parameter_averaging import ParameterAveragingPhase
from asyncddp.errors import UsageError
from asyncddp.tensors.allocation import detached_copy

logger = logging.getLogger("asyncddp")


class OverlappedPhase(ParameterAveragingPhase):
    """Communication phase that averages parameters while gradients are computed.

    The first forward pass in training mode after a step starts the round, or else ``step()`` does.
    The average is written just before the update. Another forward pass, such as one for logging,
    starts no round. But a forward pass between two calls of ``zero_grad()``, with neither backward
    nor step, means that the user has skipped a step: the pending round is finished before the next
    one starts, so that neighbours need not wait.
    """

    averages_in_place = False  # the model reads them
    hooks_forward: ClassVar[bool] = True
    _versions: list[list[int]] | None = None
    _zeroed = _forward_seen = _forward_discarded = False

    @override
    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        trains = module.training and torch.is_grad_enabled() and not self.config.averager.lent
        if self._in_step or not trains:
            return
        if self._forward_discarded:
            logger.info(
                "%s: a forward pass between two zero_grad() is taken for a skipped step; evaluate "
                "under torch.no_grad() what is for a log",
                self.config.averager.label,
            )
            self._end_skipped_step()
            self._zeroed = True
        self._forward_seen |= self._zeroed
        # after the end of the world the model is used without its optimizer
        ended = self.config.averager.context.engine.closed
        if self._round is None and not ended and self._should_start_round():
            self._start_round()

    def _should_start_round(self) -> bool:
        return self.accumulation.due(more=1)

    def _end_skipped_step(self) -> None:
        self._end_step(averaged=self._finish_round())

    @override
    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        super()._on_gradient(index, parameter)
        self._forward_discarded = False

    def on_zero_grad(self) -> None:
        """Mark the last forward pass as discarded, unless a backward pass follows."""
        self._zeroed, self._forward_discarded = True, self._forward_seen

    @override
    def _averages_in_step(self) -> bool:
        return self._round is not None or self.accumulation.due()

    @override
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        if averaged and self._round is None:
            self._start_round()
        before: list[torch.Tensor] = []

        def average() -> None:
            if self._finish_round() or not before:
                before[:] = self._copies_to_scale()

        def evaluate() -> Any:
            assert closure is not None
            loss = closure()
            average()  # after the first evaluation
            return loss

        if closure is None or self.accumulation.current_passes:  # the gradient was taken before
            average()
        loss = update(None if closure is None else evaluate)
        self._scale_change(before)
        self._finish_round()
        return loss

    @override
    def _start_round(self) -> None:
        super()._start_round()
        if self._round is not None:
            self._versions = [bucket.versions() for bucket in self.buckets]

    def _finish_round(self) -> bool:
        """Finish the pending round; return whether there was one."""
        pending_round, self._round = self._round, None
        if pending_round is None:
            return False
        pending_round.finish(self._check_unchanged)
        self._write_parts()
        return True

    def _check_unchanged(self, index: int) -> None:
        bucket = self.buckets[index]
        changed = bucket.detached_indices()
        if self._versions is not None:
            pairs = enumerate(zip(bucket.versions(), self._versions[index], strict=True))
            changed += [position for position, (now, then) in pairs if now != then]
        if changed:
            raise UsageError(
                f"parameter {bucket.names[changed[0]]} was changed between the forward pass and "
                "step(), while it was being averaged with the neighbours'; change parameters after "
                "step(), or use algorithm='adapt_then_combine', which averages inside step()"
            )

    @override
    def _end_step(self, *, averaged: bool) -> None:
        super()._end_step(averaged=averaged)
        self._zeroed = self._forward_seen = self._forward_discarded = False

    def conclude(self) -> None:
        """Finish the round of a forward pass without a following step."""
        if self._round is not None:
            self._end_step(averaged=self._finish_round())

    def wait_for_reads(self) -> None:
        """Wait for the messages of the pending round; its result stays pending."""
        if self._round is not None:
            self._round.wait_for_reads()
            for index in range(len(self.buckets)):
                self._check_unchanged(index)
            self._versions = None


class BackgroundAveragingPhase(OverlappedPhase):
    r"""Communication phase that averages copies of parameters in the background, as steps continue.

    The first forward pass in training mode after an averaging sends a copy s of the parameters x,
    or else ``step()`` does. Steps go on updating x; then the change of the copy is added:

    .. math:: x \leftarrow (x - s) + \mathrm{mix}(s)
    """

    _copies: Sequence[torch.Tensor] = ()
    _copied_buckets: Sequence[object] | None = None

    def flat_tensors(self) -> list[torch.Tensor]:
        """Return the copies of the buckets, which rounds average."""
        if self._copied_buckets is not self.buckets:
            self._copies = [detached_copy(bucket.flat) for bucket in self.buckets]
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
            self._round.start(index)

    def _finish_round(self) -> bool:
        """Add the change of a pending round to the parameters; return whether there was one."""
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
            self._write_parts()
        return True

    wait_for_reads = ParameterAveragingPhase.wait_for_reads  # parameters are never read: may change
