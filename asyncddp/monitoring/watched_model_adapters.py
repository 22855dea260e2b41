"""Adapters that give optimizers and modules one common interface for monitors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases.optimizer_buckets import OptimizedParameters
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.monitoring.report_collector import ROOT
from asyncddp.optim import DistributedOptimizer
from asyncddp.optim.average_models import counted_once
from asyncddp.parallel import DecentralizedDataParallel
from asyncddp.tensors.local_parts import is_distributed, local_grad, shard

MONITORS_KEY = "monitors"
"""Key in a context's extensions of its monitors, by the labels of their targets."""


class MonitorTarget(ABC):
    """Base class of adapters through which a monitor reads an optimizer's or module's progress."""

    def __init__(self, watched: DistributedOptimizer | DecentralizedDataParallel) -> None:
        self.watched = watched
        self.context, self.label = self.averager.context, self.averager.label
        inner = self.averager.inner
        in_parts = inner is not None and inner.agree(any(map(is_distributed, self.parameters)))
        self.inner = inner if in_parts else None
        self._counted = self._count()

    @property
    @abstractmethod
    def averager(self) -> ModelAverager:
        """The averager in use, which changes when the algorithm is switched."""

    @property
    def in_step(self) -> bool:
        """True if ranks wait for each other, and thus make each step at about the same time."""
        return not self.averager.communication.asynchronous or self.averager.force_barrier

    @property
    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """The trained parameters."""

    def check_arguments(self, every: int, consensus: str | None, first_step: int) -> None:
        """Check the arguments of ``monitor``."""
        for name, steps, least, expected in (
            ("every", every, 1, "at least 1 step"),
            ("first_step", first_step, 0, "the number of steps made before"),
        ):
            if not isinstance(steps, int) or steps < least:
                raise ArgumentError(f"monitor: argument {name}: expected {expected}, got {steps!r}")
        if consensus not in ("projection", "exact", None):
            raise ArgumentError(
                "monitor: argument consensus: expected 'projection', 'exact' or None, got "
                f"{consensus!r}"
            )
        if consensus == "exact" and not self.in_step:
            raise ArgumentError(
                "monitor: argument consensus: 'exact' lets all ranks wait for each other, which a "
                "one-sided method is there to avoid; use 'projection', or call consensus_distance "
                "where ranks meet anyway"
            )
        if self.label in self.context.extensions.get(MONITORS_KEY, {}):
            raise UsageError(
                f"monitor: {self.label} is monitored already; give that monitor a list of places "
                "as `to`, or close it first"
            )

    @property
    def writes(self) -> bool:
        """True on the rank that writes the reports: the first, of a sharded replica 0 as well."""
        first = self.inner is None or self.inner.context.is_first
        return self.context.rank == ROOT and first

    @property
    def parts(self) -> list[torch.Tensor]:
        """This rank's parts of trained parameters that no lower rank of the replica has, too."""
        return [shard(one) for one in self._counted]

    def _count(self) -> list[torch.Tensor]:
        named = {str(number): one for number, one in enumerate(self.parameters)}
        return counted_once(self.inner, named)

    def whole(self, values: Sequence[float]) -> list[float]:
        """Add figures over the ranks of a sharded replica; collective in it."""
        return list(values) if self.inner is None else self.inner.sum(values)

    def prepare(self) -> None:
        """Prepare for a step that will be reported; collective in a sharded replica."""
        self._counted = self._count()

    @abstractmethod
    def gradient_norm(self) -> float | None:
        """Return the norm of this rank's gradients in the reported step; None without any."""

    @abstractmethod
    def attach(self, on_step: Callable[[], None], is_reported: Callable[[], bool]) -> None:
        """Call ``on_step`` after each step; ``is_reported`` says beforehand if it is reported."""

    @abstractmethod
    def detach(self) -> None:
        """Stop calling the callbacks."""


class OptimizerTarget(MonitorTarget):
    """Adapter for monitoring a distributed optimizer."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__(optimizer)
        self._norms: dict[int, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    @override
    def averager(self) -> ModelAverager:
        return self._optimizer._averager

    @property
    @override
    def parameters(self) -> list[torch.Tensor]:
        every = (p for group in self._optimizer.param_groups for p in group["params"])
        return [parameter for parameter in every if parameter.requires_grad and parameter.numel()]

    @override
    def prepare(self) -> None:
        super().prepare()
        self._remove_hooks()
        for parameter in self._counted:
            if parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._add_norm)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _add_norm(self, parameter: torch.Tensor) -> None:
        self._norms.update((id(parameter), norm) for norm in _gradient_norms([parameter]))

    def _remove_hooks(self) -> None:
        self._norms.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @override
    def gradient_norm(self) -> float | None:
        # where a GradScaler's unscale_ was called before the step, its factor is not known here:
        # then it is the norm of what the step has used
        scale = getattr(self._optimizer, "grad_scale", None)
        unscaled = getattr(self._optimizer, "found_inf", None) is not None and scale is None
        norms = list(self._norms.values())
        self._remove_hooks()
        if not norms or unscaled:
            norms, scale = _gradient_norms(self._counted), None
        norm = math.sqrt(_sum_of_squares(norms)) if norms else None
        return norm if norm is None or scale is None else norm / float(scale)

    @override
    def attach(self, on_step: Callable[[], None], is_reported: Callable[[], bool]) -> None:
        del is_reported
        self._hook = self._optimizer.register_step_post_hook(lambda *_: on_step())

    @override
    def detach(self) -> None:
        self._remove_hooks()
        self._hook.remove()


class ModuleTarget(MonitorTarget):
    """Adapter for monitoring a module that averages with its neighbours."""

    def __init__(self, module: DecentralizedDataParallel) -> None:
        self._reducer = module._reducer
        super().__init__(module)
        self._square: float | None = None

    @property
    @override
    def averager(self) -> ModelAverager:
        return self._reducer.averager

    @property
    @override
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for _, parameter in self._reducer.named_parameters]

    @override
    def gradient_norm(self) -> float | None:
        return None if self._square is None else math.sqrt(self._square)

    @override
    def attach(self, on_step: Callable[[], None], is_reported: Callable[[], bool]) -> None:
        self._on_step, self._is_reported = on_step, is_reported
        self._reducer.observer = self

    @override
    def detach(self) -> None:
        if self._reducer.observer is self:
            self._reducer.observer = None

    def before_update(self, bucket: OptimizedParameters) -> None:
        """Add a bucket's gradients to the norm, if the step will be reported."""
        if not self._is_reported():
            return
        counted = set(map(id, self._counted))
        parameters = [one for one in bucket.parameters if id(one) in counted]
        if norms := _gradient_norms(parameters):
            self._square = _sum_of_squares(norms) + (self._square or 0.0)

    def after_step(self) -> None:
        """Call the callback after a step."""
        self._on_step()
        self._square = None


def _gradient_norms(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norms of all existing gradients, including sparse ones."""
    gradients = (one for parameter in parameters if (one := local_grad(parameter)) is not None)
    dense = (
        one.coalesce().values() if one.layout == torch.sparse_coo else one for one in gradients
    )
    return [torch.linalg.vector_norm(values).double() for values in dense]


def _sum_of_squares(norms: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum())


def find_target(watched: object) -> MonitorTarget:
    """Return the adapter for an optimizer or module."""
    if isinstance(watched, DistributedOptimizer):
        return OptimizerTarget(watched)
    if isinstance(watched, DecentralizedDataParallel):
        return ModuleTarget(watched)
    inner = isinstance(watched, torch.optim.Optimizer)
    hint = "the wrapper, not the optimizer in it" if inner else "what the training loop steps with"
    raise ArgumentError(
        "monitor: argument watched: expected a DistributedOptimizer or a "
        f"DecentralizedDataParallel, got {type(watched).__name__}; give {hint}"
    )
