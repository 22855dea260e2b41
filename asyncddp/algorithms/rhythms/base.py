"""What all rhythms share: the parameters they look after, and the count of passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import finalize

import torch
from torch.utils.hooks import RemovableHandle

from asyncddp.algorithms.mixer import Mixer
from asyncddp.algorithms.passes import Passes
from asyncddp.algorithms.rhythms.hooks import Weakly
from asyncddp.errors import ArgumentError
from asyncddp.memory.buckets import ParameterBucket, partition

if TYPE_CHECKING:
    from asyncddp.algorithms.recorded import Training

__all__ = ["Closure", "Named", "ParameterRhythm", "Rhythm", "Setting", "Update"]

Closure: TypeAlias = Callable[[], Any]
Update: TypeAlias = Callable[[Closure | None], Any]
Named: TypeAlias = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """What a rhythm works on.

    Attributes:
        mixer: Starts its rounds.
        optimizer: The user's own optimizer.
        models: The modules to which the optimizer's parameters belong.
        every: ``num_steps_per_communication``.
        cap: Bytes in a bucket.
        training: Takes notes for the timeline, if there is one.
    """

    mixer: Mixer
    optimizer: torch.optim.Optimizer
    models: Sequence[torch.nn.Module]
    every: int
    cap: int
    training: Training | None = None

    def trainable(self) -> Named:
        """Names and parameters of the optimizer that get gradients, in its order.

        Raises:
            ArgumentError: One of the optimizer's parameters belongs to none of the models, is
                sparse, or has no memory.
        """
        names = {
            id(parameter): f"{number}.{name}" if len(self.models) > 1 else name
            for number, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }
        named = []
        for group, options in enumerate(self.optimizer.param_groups):
            for place, parameter in enumerate(options["params"]):
                if id(parameter) not in names:
                    raise ArgumentError(
                        f"argument optimizer: parameter {place} of group {group}, of shape "
                        f"{tuple(parameter.shape)}, belongs to none of the models given; pass the "
                        "model that owns it, or a list of models"
                    )
                if parameter.requires_grad and parameter.numel():
                    named.append((names[id(parameter)], parameter))
        for name, parameter in named:
            if parameter.layout != torch.strided or parameter.is_meta:
                what = "on the meta device" if parameter.is_meta else str(parameter.layout)
                raise ArgumentError(
                    f"argument model: parameter {name} is {what}; expected a dense tensor in memory"
                )
        return named


class Rhythm(ABC):
    """When the rounds of averaging start and end, around the user's own training loop.

    Args:
        setting: What it works on.
    """

    listens = True
    """Whether gradients that get ready are of interest."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.passes = Passes(setting.every)
        self.named: Named = []
        self._stepping = False
        self._listeners: list[RemovableHandle] = []
        self._bells: list[RemovableHandle] = []
        for hooks in (self._listeners, self._bells):
            finalize(self, _remove, hooks).atexit = False

    @abstractmethod
    def step(self, update: Update, closure: Closure | None, *, scaled: bool) -> Any:
        """Do what ``optimizer.step(closure)`` does.

        Args:
            update: Runs the user's optimizer, with a closure or None.
            closure: The user's.
            scaled: Whether a GradScaler makes the call.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until no parameter is being read by a message any more."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is under way: the parameters are about to be replaced."""

    @abstractmethod
    def build(self) -> None:
        """Lay the parameters of ``self.named`` out in buckets."""

    def flats(self) -> list[torch.Tensor]:
        """The flat tensors that rounds are about."""
        return []

    def conclude(self) -> None:  # noqa: B027 - few rhythms care
        """No step will follow for now: end the round under way, if there is one."""

    def gradient_ready(self, index: int) -> None:
        """Parameter ``index`` got its gradient, added to what it had."""
        if not self._stepping:
            self.passes.record(index)

    def synchronize(self) -> None:  # noqa: B027 - few rhythms care
        """Average what gradients are left to be averaged before the step."""

    def zeroed(self) -> None:  # noqa: B027 - few rhythms care
        """The user has called ``zero_grad()``."""

    def intact(self) -> bool:
        """Whether the buckets still fit the parameters."""
        return True

    def refresh(self) -> None:
        """Follow what the user did to the parameters since last time.

        Groups may have been added, parameters frozen, moved, cast or assigned anew. All ranks
        must do the same.
        """
        if self.setting.mixer.silent:
            return
        before, current = [p for _, p in self.named], self._parameters()
        same = len(before) == len(current) and all(map(_is, before, current))
        if not (same and self.intact()):
            self.rebuild()

    def rebuild(self) -> None:
        """Make all buckets anew."""
        _remove(self._listeners)
        self.named = self.setting.trainable()
        self.build()
        if self.listens:
            for index, (_, parameter) in enumerate(self.named):
                hook = Weakly(self._ready, index)
                listener = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._listeners.append(listener)

    def detach(self) -> None:
        """Listen no more; ``step()`` still does all that is needed."""
        _remove(self._listeners)
        _remove(self._bells)
        self.listens = False

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        del parameter
        self.gradient_ready(index)

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for group in self.setting.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel()
        ]


class ParameterRhythm(Rhythm):
    """A rhythm in which parameters travel; they live in flat buckets."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.buckets: list[ParameterBucket] = []
        if not setting.mixer.silent:
            self.rebuild()

    def build(self) -> None:
        """Make the parameters views of flat buckets, which neighbours can read where they lie."""
        near = self.setting.mixer.context.transport.neighborhood
        make = None if near is None else near.arena.empty
        with torch.no_grad():
            self.buckets = [
                ParameterBucket([self.named[index] for index in indices], make)
                for indices in partition([p for _, p in self.named], self.setting.cap)
            ]
        self.setting.mixer.lay_out(self.flats())

    def flats(self) -> list[torch.Tensor]:
        """The flat tensors that rounds are about."""
        return [bucket.flat for bucket in self.buckets]

    def intact(self) -> bool:
        """Take in again what is no longer a view; False where that needs other buckets."""
        with torch.no_grad():
            return all([bucket.mend() for bucket in self.buckets])


def _is(one: object, other: object) -> bool:
    return one is other


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
