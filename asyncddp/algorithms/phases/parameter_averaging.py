"""Base class of communication phases that average parameters, held in flat buckets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    CommunicationPhase,
    PhaseConfig,
    Update,
)
from asyncddp.algorithms.rounds.averaging_round import AveragingRound
from asyncddp.context.context import use
from asyncddp.errors import UsageError
from asyncddp.ops.allreduce import allreduce
from asyncddp.ops.settings_agreement import tensors_of
from asyncddp.tensors.allocation import make_tensor
from asyncddp.tensors.buckets import (
    ParameterBucket,
    fragments_of,
    padded_nbytes,
    partition,
    require_untied,
)
from asyncddp.tensors.local_parts import local, set_local


class ParameterAveragingPhase(CommunicationPhase):
    """Base class of communication phases that average parameters, held in flat buckets.

    Parameters without a gradient on any rank must not change. Averages of equal values do not
    change them, but compressors mix neighbouring elements, or round at random. So compressed
    buckets leave such parameters out: before each round ranks agree by a small allreduce on the
    parameters that have been used, until all have been.
    """

    averages_in_place: ClassVar[bool] = True
    """True if nothing else reads the buckets from the start of a round to its end."""

    def __init__(self, config: PhaseConfig) -> None:
        super().__init__(config)
        self.buckets: list[ParameterBucket] = []
        self._prepared = False
        self._round: AveragingRound | None = None
        self._names: list[str] = []
        self._left_out: set[str] = set()
        self._start()

    @override
    def wait_for_reads(self) -> None:
        if self._round is not None:
            self._round.wait_for_reads()

    @override
    def reset(self) -> None:
        if self._round is not None:
            self._round.wait_for_reads()
        self._round = None
        self._end_step(averaged=True)

    @override
    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        averaged = self._averages_in_step()
        self._in_step, self._prepared = True, False
        try:
            loss = self._run_step(update, closure, averaged=averaged)
        finally:
            self._in_step = False
        averager, method = self.config.averager, self.config.averager.algorithm
        if self._prepared or not method.replaces_gradients:
            steps = 0 if averaged else self.accumulation.carried_passes + 1
            averager.number_buckets(averager.round - (self._round is None), steps)
            with torch.no_grad():
                self._read_parts()
                for bucket in averager.buckets:
                    method.after_step(bucket)
                self._write_parts()
        self._unify_copies()
        self._end_step(averaged=averaged)
        return loss

    @override
    def before_update(self) -> None:
        method = self.config.averager.algorithm
        self._note_used()
        if not method.replaces_gradients or self.config.averager.idle:
            return
        if self._prepared:
            raise UsageError(
                f"{method.name} replaces gradients once a step, but the closure was evaluated "
                "again; use an optimizer that evaluates it once, which LBFGS does not, or "
                "algorithm='adapt_then_combine'"
            )
        self._prepared = True
        self.rebuild_if_changed()
        with torch.no_grad():
            for bucket in self.config.averager.buckets:
                method.before_update(bucket)
            self._write_parts()

    def _note_used(self) -> None:
        """Record the parameters with gradients, if unused ones may be left out."""
        averager = self.config.averager
        if averager.compressor is not None and len(averager.agreed_used) < len(self._names):
            averager.used |= {name for name, p in self.named_parameters if p.grad is not None}

    def _leave_out_unused(self) -> None:
        """Exclude parameters without gradients on any rank from compressed buckets; collective."""
        averager, names = self.config.averager, self._names
        alone = averager.single_rank or averager.communication.how is None
        if averager.compressor is None or alone or len(averager.agreed_used) == len(names):
            return
        if averager.join_coordinator is not None:  # ranks that are done do not take part
            return
        flags = make_tensor([name in averager.used for name in names], torch.uint8)
        with use(averager.context):
            flags = allreduce(flags, op="max", name=f"{averager.label}.used")
        used = {name for name, used in zip(names, flags.tolist(), strict=True) if used}
        averager.agreed_used = used
        averager.used |= used
        unused = {*names} - used
        if used and unused != self._left_out:
            self._left_out = unused
            self.rebuild()

    @abstractmethod
    def _run_step(self, update: Update, closure: Closure | None, *, averaged: bool) -> Any:
        """Run the optimizer's step; average the parameters if ``averaged``."""

    def _copies_to_scale(self) -> list[torch.Tensor]:
        """Copy the parameters before an update if it is to be scaled; else return no copies."""
        scaled = self.config.averager.step_scale != 1.0
        return [flat.clone() for flat in self.flat_tensors()] if scaled else []

    def _scale_change(self, before: Sequence[torch.Tensor]) -> None:
        """Multiply the change since the copies ``before`` by the step scale."""
        if not before:
            return
        self.repair_buckets()  # the update may have assigned parameters anew
        with torch.no_grad():
            for flat, old in zip(self.flat_tensors(), before, strict=True):
                flat.sub_(old).mul_(self.config.averager.step_scale).add_(old)
            self._write_parts()

    def _read_parts(self) -> None:
        """Copy parameters that cannot be views of the buckets there."""
        for bucket in self.buckets:
            bucket.read()

    def _write_parts(self) -> None:
        """Copy what the buckets hold to parameters that cannot be views of them."""
        for bucket in self.buckets:
            bucket.write()

    def _averages_in_step(self) -> bool:
        return self.accumulation.due()

    def _end_step(self, *, averaged: bool) -> None:
        self.accumulation.end(averaged=averaged)
        self.backward_pass.forget_failed()  # of a model that is not called, whose hook would

    def _start_round(self) -> None:
        self.rebuild_if_changed()
        self._leave_out_unused()
        self._round = self.config.averager.begin_round()
        if self._round is not None:
            for index in range(len(self.buckets)):
                self._round.start(index)

    def build_buckets(self) -> None:
        """Make the parameters views in flat buckets, in shared memory if possible."""
        averager, make = self.config.averager, self.config.averager.tensor_factory
        self._require_untied()
        self._names = [name for name, _ in self.named_parameters]
        self.config.averager.agreed_used.intersection_update(self._names)
        self._left_out.intersection_update(self._names)
        for name, parameter in self.named_parameters:
            if name in self._left_out:
                set_local(parameter, local(parameter).clone())  # so that no old bucket is kept
        named = [pair for pair in self.named_parameters if pair[0] not in self._left_out]
        parameters = [parameter for _, parameter in named]
        fragments = averager.algorithm.fragments
        kinds = self.copies.kinds([name for name, _ in named])
        parts = partition(parameters, self.config.bucket_bytes, fragments, kinds)
        on_host = all(parameter.is_cpu for parameter in parameters)
        sizes = [sum(padded_nbytes(local(parameters[i])) for i in part) for part in parts]
        unit = averager.choose_pieces(sizes, on_host=on_host)
        with torch.no_grad():
            self.buckets = [ParameterBucket([named[i] for i in part], make, unit) for part in parts]
        of_each = fragments_of(parameters, fragments)
        for bucket, part in zip(self.buckets, parts, strict=True):
            bucket.fragment = of_each[part[0]]
        averager.in_place = self.averages_in_place
        self._set_averaged_buckets(self.flat_tensors(), self.buckets, self._left_out)

    def flat_tensors(self) -> list[torch.Tensor]:
        """Return the flat tensors that rounds average."""
        return [bucket.flat for bucket in self.buckets]

    def repair_buckets(self) -> bool:
        """Make detached parameters views again; False if that needs new buckets."""
        if any(bucket.detached_indices() for bucket in self.buckets):
            self._require_untied()
        with torch.no_grad():
            return all([bucket.reattach() for bucket in self.buckets])

    def _require_untied(self) -> None:
        """Raise an ArgumentError if a parameter shares memory with another one or a buffer."""
        for model in self.config.models:
            require_untied(self.named_parameters, tensors_of(model).items())
