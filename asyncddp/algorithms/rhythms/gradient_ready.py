"""Averaging of gradients, bucket by bucket while the backward pass goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable

from asyncddp.algorithms.mixer import Round
from asyncddp.algorithms.rhythms.base import Closure, Rhythm, Setting, Update
from asyncddp.algorithms.rhythms.hooks import Weakly, watch
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.memory.allocate import empty_like, values
from asyncddp.memory.buckets import FlatBucket, partition

__all__ = ["GradientReady"]


class GradientReady(Rhythm):
    """The rhythm of ``gradient_allreduce``.

    Buckets hold the parameters in reverse order, as gradients get ready. They are sent in that
    order on all ranks, whichever is ready first, and taken at the end of the backward pass, so that
    clipping and scaling after it see averaged gradients. A parameter that was not used counts as
    zero; one that no rank has used keeps the gradient None. With J backward passes per averaging
    the J-th pass averages what has been accumulated, and ``step()`` whatever is left, so that the
    ranks' parameters stay equal.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._buckets: list[_GradientBucket] = []
        self._round: Round | None = None
        self._open = False
        self._missing: list[set[int]] = []
        self._next = 0
        self._fresh = True
        self._armed = False
        if not setting.mixer.silent:
            self.rebuild()
            for model in setting.models:
                self._bells.append(model.register_forward_hook(Weakly(self._forward)))

    def build(self) -> None:
        """Make room for the gradients, in reverse order."""
        backwards = list(reversed(range(len(self.named))))
        tensors = [self.named[index][1] for index in backwards]
        self._buckets = [
            _GradientBucket([(backwards[place], *self.named[backwards[place]]) for place in places])
            for places in partition(tensors, self.setting.cap)
        ]
        self._bucket_of = {
            index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices
        }

    def flats(self) -> list[torch.Tensor]:
        """The rooms of the gradients."""
        return [bucket.flat for bucket in self._buckets]

    def intact(self) -> bool:
        """Whether the parameters still fit their rooms."""
        return all(bucket.fits() for bucket in self._buckets)

    def gradient_ready(self, index: int) -> None:
        """Send what is complete, in the order of the buckets."""
        if self.setting.mixer.silent:
            return
        self._fresh = True
        self.passes.record(index)
        if self.passes.now < self.passes.every:
            return
        if not self._open:
            numbering = self.named
            self._begin()
            self._ring()
            if self.named is not numbering:  # rebuilt: left to the end of the pass
                return
        number = self._bucket_of[index]
        self._missing[number].discard(index)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send()

    def _forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Hear of it when a backward pass begins, so that its outermost end is known."""
        del module, args
        if torch._C._current_graph_task_id() == -1:
            self._armed = False  # a pass that has failed will never end
        if torch.is_grad_enabled():
            watch(output, Weakly(self._ring))

    def _ring(self, gradient: torch.Tensor | None = None) -> None:
        """A backward pass goes on; when it ends, what is left is averaged."""
        del gradient
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(Weakly(self._finish))

    def _begin(self) -> None:
        self.refresh()
        self._open, self._next = True, 0
        self._round = self.setting.mixer.begin()
        self._missing = [set(bucket.indices) for bucket in self._buckets]

    def _send(self) -> None:
        """Send the next bucket."""
        if self._round is not None:
            with torch.no_grad():
                self._buckets[self._next].fill()
            self._round.start(self._next, self._buckets[self._next].flat)
        self._next += 1

    def _finish(self) -> None:
        """Send what is left, take all averages."""
        self._armed = False
        if not self._open:
            return
        while self._next < len(self._buckets):
            self._send()
        under_way, self._round, self._open = self._round, None, False
        if under_way is not None:
            under_way.install()
            with torch.no_grad():
                for bucket in self._buckets:
                    bucket.spill()
        self.passes.end(averaged=True)
        self._fresh = False

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Average what is left, then step."""
        if closure is None:
            self._average_the_rest(scaled)
        loss = update(closure if closure is None else self._then_average(closure))
        self._fresh = True
        return loss

    def synchronize(self) -> None:
        """Average what no backward pass has, so that clipping before step() sees averages."""
        self._average_the_rest(scaled=False)

    def _average_the_rest(self, scaled: bool) -> None:
        """Average what no backward pass has: accumulated, or set by hand."""
        if not self._fresh or self.setting.mixer.silent:
            return
        if scaled:
            raise UsageError(
                "GradScaler has looked for infinities in gradients that were not averaged yet, so "
                "that ranks would disagree; call optimizer.synchronize() on all ranks before "
                "scaler.unscale_ and scaler.step, or call backward a multiple of "
                f"num_steps_per_communication={self.passes.every} times before them"
            )
        if not self._open:
            self._begin()
        self._finish()

    def _then_average(self, closure: Closure) -> Closure:
        """The closure, each evaluation of which gives averaged gradients and loss.

        The loss is averaged too, so that optimizers which look at it decide alike on all ranks.
        """

        def evaluate() -> Any:
            """Evaluate the closure with gradients that are averaged."""
            self._fresh = True
            loss = closure()
            self._average_the_rest(scaled=False)
            return self.setting.mixer.mean(loss)

        return evaluate

    def zeroed(self) -> None:
        """A backward pass that has failed half-way is forgotten."""
        self._open, self._round, self._armed = False, None, False
        self.passes.end(averaged=True)

    def settle(self) -> None:
        """No parameter is ever read by a message."""

    def forget(self) -> None:
        """Start counting anew."""
        self.zeroed()


class _GradientBucket(FlatBucket):
    """Room for the gradients of some parameters, and for a mark of who has one."""

    def __init__(self, numbered: list[tuple[int, str, torch.Tensor]]) -> None:
        self.indices = [index for index, _, _ in numbered]
        self.names = [name for _, name, _ in numbered]
        self.parameters = [parameter for _, _, parameter in numbered]
        super().__init__([p.data for p in self.parameters], extra=len(numbered))

    def fits(self) -> bool:
        """Whether the parameters still have the dtype, device and shape of their rooms."""
        return all(
            (p.dtype, p.device, p.shape) == (view.dtype, view.device, view.shape)
            for p, view in zip(self.parameters, self.views, strict=True)
        )

    def fill(self) -> None:
        """Copy the gradients in; zeros where there is none."""
        marks = []
        for name, parameter, view in zip(self.names, self.parameters, self.views, strict=True):
            gradient = parameter.grad
            marks.append(float(gradient is not None))
            if gradient is None:
                view.zero_()
            elif gradient.layout != torch.strided:
                raise ArgumentError(
                    f"gradient_allreduce: the gradient of {name} is {gradient.layout}; expected a "
                    "dense one. Build the embedding with sparse=False, or average parameters, "
                    "with algorithm='adapt_with_combine'"
                )
            else:
                view.copy_(gradient)
        self.tail.copy_(values(marks, self.tail.dtype))

    def spill(self) -> None:
        """Copy the averages out; a gradient that is None stays so if it is None everywhere."""
        absent = [place for place, p in enumerate(self.parameters) if p.grad is None]
        used = (self.tail != 0).tolist() if absent else []
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(view)
            elif used[place]:
                parameter.grad = empty_like(parameter).copy_(view)
