"""``fuse_optimizer``: optimizer steps that update parameters adjacent in memory as one tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from asyncddp.errors import ArgumentError
from asyncddp.optim.accum_adam import AccumAdam, AccumAdamW
from asyncddp.optim.optimizer_wrapper import TransparentOptimizerWrapper
from asyncddp.optim.parameter_runs import GroupRuns, States, distance, moments_of
from asyncddp.optim.qadam import QAdamOptimizer
from asyncddp.tensors.buckets import (
    ALIGNMENT,
    FlatBucket,
    ParameterBucket,
    partition,
    require_untied,
)
from asyncddp.tensors.local_parts import is_distributed

OptimizerType = TypeVar("OptimizerType", bound=torch.optim.Optimizer)

ELEMENTWISE = {
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam,
    torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, AccumAdam, AccumAdamW, QAdamOptimizer,
}  # fmt: skip
"""Optimizers that treat each element by itself; subclasses may do something else."""


def fuse_optimizer(
    opt: OptimizerType,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    elementwise: bool = False,
) -> OptimizerType:
    """Add ``fuse_step()`` to an optimizer: a ``step()`` with few operations on large tensors.

    Parameters of a group whose weights, gradients and moments follow each other in memory are
    updated as one tensor. ``state_dict()`` stays per parameter, and both kinds of steps may
    alternate. Results are those of ``step()`` bit for bit, but for halves and ``fused=True``, where
    kernels of torch round by an element's place in its tensor. It pays where many small parameters
    are updated one after another, as on CPUs.

    Of a wrapper such as :func:`asyncddp.DistributedOptimizer`, fuse the wrapper; its ``fuse_step``
    averages as its ``step`` does. Parameters have one place: who moves them last has them there, a
    wrapper that keeps them in buckets or this function.

    Args:
        opt: The optimizer.
        do_flatten: Whether to move weights, gradients and moments so that they follow each other.
            Without it only those that do so already are treated as one. Gradients stay in place if
            they are reset by ``zero_grad(set_to_none=False)``; others are copied in each step.
        check_flatten: Whether each ``fuse_step()`` moves parameters again that something else has
            moved since, and new ones; without it they are updated one by one.
        elementwise: Whether you vouch that an optimizer that is none of torch's updates each
            element by itself.

    Returns:
        The optimizer itself, with ``fuse_step(closure=None)``.

    Raises:
        ArgumentError: It is fused already, or an update of its parameters is more than one of each
            element.

    Example:
        >>> import asyncddp as bf, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = bf.fuse_optimizer(optimizer)
        >>> for _ in range(2):
        ...     optimizer.zero_grad(set_to_none=False)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.fuse_step()
        >>> optimizer.state[model[0].bias]["momentum_buffer"].shape
        torch.Size([3])
    """
    inner = opt.wrapped if isinstance(opt, TransparentOptimizerWrapper) else opt
    if "fuse_step" in {*vars(opt), *vars(inner)}:
        raise ArgumentError(
            "fuse_optimizer: argument opt: expected an optimizer that is not fused, got one that "
            "has a fuse_step() already; fuse it once, and the wrapper where there is one"
        )
    differentiable = any(group.get("differentiable") for group in inner.param_groups)
    if (type(inner) not in ELEMENTWISE and not elementwise) or differentiable:
        raise ArgumentError(
            "fuse_optimizer: argument opt: expected an optimizer that updates each element by "
            "itself and is not differentiable, such as SGD or Adam, got "
            f"{type(inner).__name__}{'(differentiable=True)' * differentiable}; give "
            "elementwise=True for one of your own that does"
        )
    every = (one for group in inner.param_groups for one in group["params"])
    if any(map(is_distributed, every)):
        raise ArgumentError(
            "fuse_optimizer: argument opt: expected ordinary parameters, got DTensors, which "
            "cannot share flat memory with their states; use the optimizer's own fused=True or "
            "foreach=True"
        )
    opt.fuse_step = _FusedStep(  # type: ignore[attr-defined]
        opt, inner, do_flatten=do_flatten, check_flatten=check_flatten
    )
    return opt


class _FusedStep:
    """Implementation of ``fuse_step``: a step over a few flat tensors."""

    def __init__(
        self,
        entry: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer,
        *,
        do_flatten: bool,
        check_flatten: bool,
    ) -> None:
        self._entry, self._optimizer = entry, optimizer
        self._checks = do_flatten and check_flatten
        self._alignment = ALIGNMENT if do_flatten else 1
        self._flat = _flatten(optimizer) if do_flatten else []
        self._count = self._parameter_count()
        self._runs: list[GroupRuns] = []

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; ``closure`` evaluates the model and returns the loss."""
        if not isinstance(self._entry, TransparentOptimizerWrapper):
            return self._run(closure)
        with self._entry.replaced_update(self._run):
            return self._entry.step() if closure is None else self._entry.step(closure)

    def _run(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._checks and not self._is_complete():
                self._flat, self._count = _flatten(self._optimizer), self._parameter_count()
            for flat in self._flat:
                flat.gather_gradients()
            with self._flat_parameters():
                result = self._optimizer.step()
        return result if closure is None else loss

    def _parameter_count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)

    def _is_complete(self) -> bool:
        """Move relocated parameters back; return False if some do not fit or are new."""
        known = self._count == self._parameter_count()
        return known and all(flat.weights.reattach() for flat in self._flat)

    @contextmanager
    def _flat_parameters(self) -> Iterator[None]:
        """Replace the parameters of runs by flat tensors within the ``with`` block."""
        states: States = self._optimizer.state
        groups = self._optimizer.param_groups
        before = [group["params"] for group in groups]
        found = [[one for one in group if one.grad is not None] for group in before]
        if not self._is_current(found, states):
            for flat in self._flat:
                flat.gather_moments(states)
            self._runs = [GroupRuns(group, states, self._alignment) for group in found]
        try:
            for group, division in zip(groups, self._runs, strict=True):
                group["params"] = [*division.alone, *(run.flat for run in division.runs)]
                for run in division.runs:
                    run.lend(states)
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters
            for run in (run for division in self._runs for run in division.runs):
                for member in run.members:
                    increment_version(member)
                run.write_back(states)

    def _is_current(self, found: Sequence[list[torch.Tensor]], states: States) -> bool:
        return len(found) == len(self._runs) and all(
            division.is_current(group, states)
            for group, division in zip(found, self._runs, strict=True)
        )


class _FlatMemory:
    """Flat memory for parameters of the same group, dtype and device, and for their gradients."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        named = [(f"parameter {place}", one) for place, one in enumerate(parameters)]
        require_untied(named)
        self.weights = ParameterBucket(named)
        self._gradients = FlatBucket([parameter.data for parameter in parameters])

    def gather_gradients(self) -> None:
        """Move gradients into flat memory, unless they are laid out like the weights."""
        apart, views = [], []
        for parameter, view in zip(self.weights.parameters, self._gradients.views, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                continue
            if gradient.data_ptr() != view.data_ptr():
                apart.append(gradient)
                views.append(view)
                parameter.grad = view
        if apart:
            torch._foreach_copy_(views, apart)

    def gather_moments(self, states: States) -> None:
        """Move moments into flat memory, unless they are laid out like the weights."""
        parameters = self.weights.parameters
        moments = [moments_of(parameter, states) for parameter in parameters]
        for key in dict.fromkeys(key for found in moments for key in found):
            holders = [place for place, found in enumerate(moments) if key in found]
            tensors = [moments[place][key] for place in holders]
            if not _are_parallel([parameters[place] for place in holders], tensors):
                views = FlatBucket(tensors).views
                torch._foreach_copy_(views, tensors)
                for place, view in zip(holders, views, strict=True):
                    states[parameters[place]][key] = view


def _are_parallel(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors lie at the same distances as the parameters do."""
    return all(
        distance(tensors[0], tensor) == distance(parameters[0], parameter)
        for parameter, tensor in zip(parameters, tensors, strict=True)
    )


def _fitting(group: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters of a group that one operation can update together."""
    return [
        parameter
        for parameter in group["params"]
        if parameter.requires_grad and parameter.dim() > 0
        if parameter.layout == torch.strided and not parameter.is_meta
    ]


def _flatten(optimizer: torch.optim.Optimizer) -> list[_FlatMemory]:
    """Move parameters to flat memory, group by group."""
    with torch.no_grad():
        return [
            _FlatMemory([fitting[place] for place in places])
            for fitting in map(_fitting, optimizer.param_groups)
            for places in partition(fitting, sys.maxsize)
        ]
