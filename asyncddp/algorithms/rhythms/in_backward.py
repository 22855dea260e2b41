"""The optimizer's step and the averaging, bucket by bucket while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncddp.algorithms.mixer import Round
from asyncddp.algorithms.rhythms.base import Closure, ParameterRhythm, Setting, Update
from asyncddp.algorithms.rhythms.hooks import Weakly
from asyncddp.errors import UsageError

__all__ = ["InBackward"]

_INSTEAD = "use update_in_backward=False, which makes the whole update in step()"


class InBackward(ParameterRhythm):
    """``adapt_then_combine`` with overlap, where the user has asked for ``update_in_backward``.

    As soon as all gradients of a bucket are ready, the user's own optimizer steps, restricted to
    the bucket's parameters, and the bucket is sent. ``step()`` does what is left and takes the
    averages. Whatever would change gradients between backward and ``step()`` comes too late, and is
    refused.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._round: Round | None = None
        self._ready_in: dict[int, set[int]] = {}
        self._used: dict[int, tuple[torch.Tensor, int]] = {}
        if not setting.mixer.silent:
            for model in setting.models:
                self._bells.append(model.register_forward_pre_hook(Weakly(self._forward)))

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """Follow what the user did to the parameters before gradients are formed."""
        del args
        if module.training and torch.is_grad_enabled() and not self._ready_in:
            self.refresh()

    def build(self) -> None:
        """Make the parameters views of flat buckets, and know each one's."""
        super().build()
        places = {
            id(parameter): bucket
            for bucket, content in enumerate(self.buckets)
            for parameter in content.parameters
        }
        self._bucket_of = [places[id(parameter)] for _, parameter in self.named]

    def gradient_ready(self, index: int) -> None:
        """Update a bucket whose gradients are complete."""
        count = self.passes.record(index)
        bucket = self._bucket_of[index]
        if index in self._used or index in self._ready_in.get(bucket, ()):
            raise UsageError(
                f"parameter {self.named[index][0]} got gradient {count} before step(), but with "
                "update_in_backward=True the one before was the last; give the number of backward "
                f"passes per step() as num_steps_per_communication, or {_INSTEAD}"
            )
        if not self.passes.due():
            return
        ready = self._ready_in.setdefault(bucket, set())
        ready.add(index)
        if len(ready) == len(self.buckets[bucket].parameters):
            self._update(bucket)

    def _update(self, bucket: int) -> None:
        """Step with one bucket's parameters, and send them."""
        if not self._used:
            self._open()
        content = self.buckets[bucket]
        optimizer = self.setting.optimizer
        with only(optimizer, {id(parameter) for parameter in content.parameters}):
            training = self.setting.training
            (optimizer.step if training is None else training.update(optimizer.step, bucket))()
        for index, (_, parameter) in enumerate(self.named):
            if self._bucket_of[index] == bucket and parameter.grad is not None:
                self._used[index] = parameter.grad, parameter.grad._version
        if self._round is not None:
            self._round.start(bucket, content.flat)

    def _open(self) -> None:
        with torch.no_grad():
            fits = self.intact()
        if not fits:
            raise UsageError(
                "parameters were moved or cast between forward and backward; with "
                f"update_in_backward=True do that after step(), or {_INSTEAD}"
            )
        self._round = self.setting.mixer.begin()

    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Do what was not done in backward, and take the averages."""
        if closure is not None:
            raise UsageError(
                f"step(closure) evaluates more than once and cannot update in backward; {_INSTEAD}"
            )
        if scaled:
            raise UsageError(
                f"GradScaler unscales gradients after backward, when they were used; {_INSTEAD}"
            )
        self._gradients_untouched()
        averaged = self.passes.due()
        loss: Any = None
        if not self._used:
            loss = update(None)
        elif rest := self._not_updated():
            with only(self.setting.optimizer, rest):
                update(None)
        if averaged:
            self._average()
        self._end(averaged=averaged)
        return loss

    def _not_updated(self) -> set[int]:
        """Ids of the parameters that backward left to step()."""
        updated = {id(self.named[index][1]) for index in self._used}
        return {id(parameter) for parameter in self._parameters()} - updated

    def _average(self) -> None:
        """Send what was not sent in backward, and take everything."""
        if not self._used:
            self.refresh()
            self._round = self.setting.mixer.begin()
        if self._round is not None:
            for index, bucket in enumerate(self.buckets):
                if not self._round.started(index):
                    self._round.start(index, bucket.flat)
            self._round.install()

    def _gradients_untouched(self) -> None:
        """Insist that gradients are as they were when the update used them."""
        for index, (gradient, version) in self._used.items():
            name, parameter = self.named[index]
            if parameter.grad is not gradient or gradient._version != version:
                raise UsageError(
                    f"the gradient of {name} was changed between backward and step() (clipped, "
                    "unscaled or zeroed), but with update_in_backward=True the update had used it "
                    f"already; {_INSTEAD}"
                )

    def _end(self, *, averaged: bool) -> None:
        self._round = None
        self._ready_in, self._used = {}, {}
        self.passes.end(averaged=averaged)

    def conclude(self) -> None:
        """Take the averages of a backward pass that no step has followed."""
        if self._used:
            self._average()
            self._end(averaged=True)

    def settle(self) -> None:
        """Wait for what was sent in backward."""
        if self._round is not None:
            self._round.settle()

    def forget(self) -> None:
        """Drop the round under way."""
        self.settle()
        self._end(averaged=True)


@contextmanager
def only(optimizer: torch.optim.Optimizer, chosen: Collection[int]) -> Iterator[None]:
    """Show an optimizer none but the parameters of these ids.

    What it writes into its groups' options is kept.
    """
    groups = optimizer.param_groups
    parts = [{**g, "params": [p for p in g["params"] if id(p) in chosen]} for g in groups]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        yield
    finally:
        for group, part in zip(groups, parts, strict=True):
            group.update({key: value for key, value in part.items() if key != "params"})
        optimizer.param_groups = groups
