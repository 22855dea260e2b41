"""Communication phase that averages gradients, bucket by bucket during the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.method_traits import AveragedQuantity
from asyncddp.algorithms.phases.communication_phase import (
    Closure,
    CommunicationPhase,
    PhaseConfig,
    Update,
)
from asyncddp.algorithms.rounds.averaging_round import AveragingRound
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, NonFiniteError, UsageError
from asyncddp.ops.neighbor_exchange import is_finite
from asyncddp.ops.object_collectives import gather_records
from asyncddp.tensors.allocation import empty_like, make_tensor
from asyncddp.tensors.buckets import NamedFlatBucket, partition
from asyncddp.tensors.local_parts import fitted, local, local_grad

_CHANGED = 4.0
"""Value of flags, over the number of ranks, if a gradient has changed after it was sent."""


class GradientReadyPhase(CommunicationPhase):
    """Communication phase that averages gradients: sends each bucket once its gradients are ready.

    Buckets hold the parameters in reverse order, and are sent in that order on all ranks,
    whichever is ready first; averages are written at the end of the backward pass. A missing
    gradient counts as zero; one that is missing on all ranks stays None. With J backward passes per
    averaging, the J-th averages the accumulated gradients, and ``step()`` averages the rest.

    A gradient may come in several pieces, from nested backward passes. It is ready when it has as
    many pieces as in earlier passes; in the first pass, at the end. The last bucket is always sent
    at the end, with a flag that a gradient has changed after it was sent: then all ranks send all
    buckets once more. On a device, where reading the flag would wait, that is an error.
    """

    def __init__(self, config: PhaseConfig) -> None:
        super().__init__(config)
        self._buckets: list[_GradientBucket] = []
        self._round: AveragingRound | None = None
        self._round_open = False
        self._missing_gradients: list[set[int]] = []
        self._next_bucket = 0
        self._has_local_gradients = True
        self._averages_momentum = config.averager.algorithm.what is AveragedQuantity.MOMENTUM
        self._gradients_hold_momentum = False
        self._changed_after_sending, self._ranks = False, config.averager.context.size
        self._compresses = config.averager.compressor is not None
        self._own_problems: list[str] = []
        self._is_finite = True
        self._start()

    def build_buckets(self) -> None:
        """Create the gradient buckets, in reverse order of the parameters."""
        backwards = [(index, *named) for index, named in enumerate(self.named_parameters)][::-1]
        kinds = self.copies.kinds([name for _, name, _ in backwards])
        every = [parameter for *_, parameter in backwards]
        parts = partition(every, self.config.bucket_bytes, kinds=kinds)
        self._buckets = [_GradientBucket([backwards[i] for i in part]) for part in parts]
        self._bucket_of = {
            index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices
        }
        self.config.averager.in_place = True
        self._set_averaged_buckets([bucket.flat for bucket in self._buckets], self._buckets)

    @override
    def repair_buckets(self) -> bool:
        return all(bucket.fits() for bucket in self._buckets)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Count a gradient, and send complete buckets in order."""
        if self.config.averager.single_rank:
            return
        if self._gradients_hold_momentum:
            raise UsageError(
                f"{self.named_parameters[index][0]} got another gradient after momentum had been "
                "averaged in its place; give the number of backward passes per step() as "
                "num_steps_per_communication, and call optimizer.zero_grad() where a step is left "
                "out"
            )
        self._has_local_gradients = True
        self._count_gradient(index)
        if not self.accumulation.complete:
            return
        if not self._round_open:
            numbering = self.named_parameters
            self._begin_round()
            if self.named_parameters is not numbering:
                return  # rebuilt: all is sent at the end of the pass
        if self._bucket_of[index] < self._next_bucket:
            self._note_changed(index)
        elif self.backward_pass.is_last(index):
            self._missing_gradients[self._bucket_of[index]].discard(index)
            self._send_ready_buckets()

    def _send_ready_buckets(self) -> None:
        """Send complete buckets in order, except the last one, which is sent at the end."""
        while self._next_bucket < len(self._buckets) - 1:
            if self._missing_gradients[self._next_bucket]:
                break
            self._send_next_bucket()

    def _note_changed(self, index: int) -> None:
        """Record that a gradient has changed after it was sent, for the flag in the last bucket."""
        if not self._buckets[-1].flat.is_cpu:
            raise UsageError(
                f"{self.named_parameters[index][0]} got another gradient in a backward pass, after "
                "the one before had been sent, which it did not in passes before; use "
                "checkpoint(..., use_reentrant=False)"
            )
        self._changed_after_sending = True

    def _begin_round(self) -> None:
        self.rebuild_if_changed()
        self._round_open, self._next_bucket = True, 0
        self._changed_after_sending = False
        self._own_problems, self._is_finite = [], True
        self._round = self.config.averager.begin_round()
        self._missing_gradients = [set(bucket.indices) for bucket in self._buckets]

    def _send_next_bucket(self) -> None:
        if self._round is not None:
            bucket = self._buckets[self._next_bucket]
            averaged = self.config.averager.buckets[self._next_bucket]
            with torch.no_grad():
                if self._compresses:
                    averaged.clear_padding()  # of which compressors lose nothing then
                last = self._next_bucket == len(self._buckets) - 1
                bucket.pack(_CHANGED * self._ranks if last and self._changed_after_sending else 0.0)
            if self._compresses and not is_finite(averaged.payload):
                self._own_problems.append(averaged.describe_not_finite(bucket.flat))
            self._round.start(self._next_bucket)
        self._next_bucket += 1

    @override
    def _on_backward_end(self) -> None:
        if not self._round_open:
            return
        averaged = self._complete_round()
        if averaged and self._changed_on_any_rank():
            self._begin_again()
            self._complete_round()
        if averaged:
            with torch.no_grad():
                for bucket in self._buckets:
                    pairs = zip(bucket.names, bucket.views, strict=True)
                    self.copies.unify((name, [view]) for name, view in pairs)
                    bucket.unpack()
                if self._compresses:
                    payloads = [bucket.payload for bucket in self.config.averager.buckets]
                    self._is_finite = all(map(is_finite, payloads))
        elif not self.config.averager.algorithm.plain:
            self._keep_own()
        self.accumulation.end(averaged=True)
        self._has_local_gradients = False
        self._gradients_hold_momentum = self._averages_momentum

    def _complete_round(self) -> bool:
        """Send the remaining buckets and wait for averages; return whether there was a round."""
        while self._next_bucket < len(self._buckets):
            self._send_next_bucket()
        pending_round, self._round, self._round_open = self._round, None, False
        if pending_round is not None:
            pending_round.finish()
        return pending_round is not None

    def _changed_on_any_rank(self) -> bool:
        """Return whether a gradient has changed on any rank after it was sent."""
        flags = self._buckets[-1].tail
        unchanged = 1 if self.config.averager.algorithm.average else self._ranks
        return flags.is_cpu and bool((flags.real > _CHANGED / 2 * unchanged).any())

    def _begin_again(self) -> None:
        """Restart the round with all buckets, discarding what was sent."""
        for bucket in self.config.averager.buckets:
            if bucket.compressor is not None:
                bucket.compressor.forget()
        self._begin_round()

    def _keep_own(self) -> None:
        """Apply the method's outgoing tensors locally, on a rank that trains alone."""
        averager = self.config.averager
        with torch.no_grad():
            for bucket, averaged in zip(self._buckets, averager.buckets, strict=True):
                bucket.pack()
                averager.algorithm.outgoing(averaged)
                bucket.unpack()

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Average remaining gradients, then run the optimizer's step."""
        if scaled and self._averages_momentum and not self.config.averager.single_rank:
            raise UsageError(
                f"{self.config.averager.algorithm.name} averages momentum, into which gradients "
                "went while GradScaler had them scaled; use torch.bfloat16, which needs no scaler, "
                "or another algorithm"
            )
        if closure is None:
            self._average_remaining(scaled)
            if not scaled:  # a GradScaler skips the step by itself
                self._require_finite()
        loss = update(closure if closure is None else self._then_average(closure))
        self._has_local_gradients, self._gradients_hold_momentum = True, False
        return loss

    def _require_finite(self) -> None:
        """Raise an error on all ranks if a compressed average is not finite; it names the ranks."""
        inner = self.averager.inner if self._compresses else None
        if self._is_finite if inner is None else not inner.agree(not self._is_finite):
            return
        context = self.config.averager.context
        with use(context):
            found = gather_records(self._own_problems, list[str], "comparison of gradients")
        by_rank = zip(context.members, found, strict=True)
        named = [f"rank {rank}: {problem}" for rank, ours in by_rank for problem in ours]
        raise NonFiniteError(
            f"{self.config.averager.label}: averaged gradients are not finite "
            f"({'; '.join(named) or 'all were, but their sum is too large'}). "
            "No parameter was updated, and error feedback is as before; go on with zero_grad(), a "
            "smaller step size, clipping, or torch.amp.GradScaler"
        )

    def synchronize(self) -> None:
        """Average remaining gradients, so that clipping before step() sees averages."""
        self._average_remaining(scaled=False)

    def _average_remaining(self, scaled: bool) -> None:
        """Average gradients not averaged by a backward pass: accumulated, or set by the user."""
        if not self._has_local_gradients or self.config.averager.single_rank:
            return
        if scaled:
            raise UsageError(
                "GradScaler has looked for infinities in gradients that were not averaged yet, so "
                "that ranks would disagree; call optimizer.synchronize() on all ranks before "
                "scaler.unscale_ and scaler.step, or call backward a multiple of "
                f"num_steps_per_communication={self.accumulation.passes_per_round} times before "
                "them"
            )
        if not self._round_open:
            self._begin_round()
        self._on_backward_end()

    def _then_average(self, closure: Closure) -> Closure:
        """Wrap a closure such that each evaluation averages gradients and loss.

        The loss is averaged, too, so that optimizers that use it decide alike on all ranks.
        """

        def evaluate() -> Any:
            self._has_local_gradients = True
            loss = closure()
            self._average_remaining(scaled=False)
            self._require_finite()
            return self.config.averager.average_scalar(loss)

        return evaluate

    def reset(self) -> None:
        """Discard the round of a failed backward pass."""
        self._round_open, self._round, self.backward_pass.open = False, None, False
        self._is_finite = True
        self._gradients_hold_momentum = False
        self.accumulation.end(averaged=True)

    on_zero_grad = reset


class _GradientBucket(NamedFlatBucket):
    """Flat bucket of gradients, with one flag per parameter: True if it has a gradient."""

    def __init__(self, numbered: list[tuple[int, str, torch.Tensor]]) -> None:
        self.indices = [index for index, _, _ in numbered]
        super().__init__([(name, one) for _, name, one in numbered], extra=len(numbered))

    def fits(self) -> bool:
        """Return whether the parameters still match dtype, device and shape of their views."""
        return all(
            (p.dtype, p.device, p.shape) == (view.dtype, view.device, view.shape)
            for p, view in zip(map(local, self.parameters), self.views, strict=True)
        )

    def pack(self, changed: float = 0.0) -> None:
        """Copy the gradients into the bucket; zeros for missing ones.

        ``changed`` above 0 replaces all flags.
        """
        has_gradient = [changed or float(one.grad is not None) for one in self.parameters]
        for name, parameter, view in zip(self.names, self.parameters, self.views, strict=True):
            gradient = local_grad(parameter)
            if gradient is None:
                view.zero_()
            elif gradient.layout != torch.strided:
                raise ArgumentError(
                    f"gradient_allreduce: the gradient of {name} is {gradient.layout}; expected a "
                    "dense one. Build the embedding with sparse=False, or average parameters, "
                    "with algorithm='adapt_with_combine'"
                )
            else:
                fitted(view, gradient).copy_(gradient)
        self.tail.copy_(make_tensor(has_gradient, self.tail.dtype))

    def unpack(self) -> None:
        """Copy the averages to the gradients; a gradient missing on all ranks stays None."""
        absent = [position for position, p in enumerate(self.parameters) if p.grad is None]
        used = (self.tail != 0).tolist() if absent else []
        for position, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is None and used[position]:
                parameter.grad = empty_like(parameter)
            gradient = local_grad(parameter)
            if gradient is not None:
                gradient.copy_(fitted(view, gradient))
