"""Redirection of an optimizer's ``step()`` and ``zero_grad()`` to an object that makes its steps.

The user's loop keeps calling the optimizer that it has created. The optimizer's methods are
replaced once; after that only their target changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol, TypeAlias, cast

import torch
from typing_extensions import override

from asyncddp.errors import UsageError
from asyncddp.optim.optimizer_wrapper import TransparentOptimizerWrapper

Closure: TypeAlias = Callable[[], Any]

_KEY = "_bagua_route"
_SCALING = ("grad_scale", "found_inf")
"""Attributes by which a GradScaler leaves unscaling and skipping to ``step()``."""


class StepTarget(Protocol):
    """Interface of the object to which an optimizer's step and zero_grad are redirected."""

    def step(self, closure: Closure | None = None) -> Any:
        """Make a step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""

    def state_loaded(self) -> None:
        """Handle a newly loaded optimizer state."""


class OptimizerRoute:
    """Redirection of an optimizer's step, zero_grad and load_state_dict to a target, if one is set.

    Attributes:
        target: Target of the calls, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.target: StepTarget | None = None
        self._optimizer = optimizer
        self._step, self._zero_grad = optimizer.step, optimizer.zero_grad
        self._load = optimizer.load_state_dict
        self._fused_step: Callable[..., Any] | None = None
        self._update: Callable[..., Any] | None = None  # under way
        replaced: Any = optimizer
        replaced.step = MethodType(_step, optimizer)  # schedulers bind its function anew
        replaced.zero_grad, replaced.load_state_dict = self.zero_grad, self.load_state_dict
        self._route_fused_step()

    def _route_fused_step(self) -> bool:
        """Route ``fuse_step()`` too, once ``fuse_optimizer`` has added it; return True if new."""
        optimizer: Any = self._optimizer
        if self._fused_step is not None or "fuse_step" not in vars(optimizer):
            return False
        self._fused_step = optimizer.fuse_step
        optimizer.fuse_step = partial(self.step, fused=True)
        return True

    def own_step(self, closure: Closure | None = None) -> Any:
        """Make the optimizer's own step, plain or fused as the caller has called it."""
        update = self._update or self._step
        return update() if closure is None else update(closure)

    def own_zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients with the optimizer's own method."""
        self._zero_grad(set_to_none)

    def step(self, closure: Closure | None = None, *, fused: bool = False) -> Any:
        """Make a step by the target; make the optimizer's own step if its fused step calls this."""
        if self._update is not None:  # called by the fused step
            return self._step() if closure is None else self._step(closure)
        if self._route_fused_step():
            self._require_parameters()
        self._update = cast("Callable[..., Any]", self._fused_step) if fused else self._step
        try:
            if self.target is None:
                return self.own_step(closure)
            with self._moved_scaling(self.target):
                return self.target.step(closure)
        finally:
            self._update = None

    def _require_parameters(self) -> None:
        """Raise UsageError if the optimizer was fused after routing, and has flat parameters."""
        for group in self._optimizer.param_groups:
            if not all(
                p.requires_grad or isinstance(p, torch.nn.Parameter) for p in group["params"]
            ):
                raise UsageError(
                    "fuse_step: the optimizer was fused after with_bagua, which would not average; "
                    "call fuse_optimizer(optimizer) before with_bagua"
                )

    @contextmanager
    def _moved_scaling(self, target: StepTarget) -> Iterator[None]:
        """Move a GradScaler's attributes from the optimizer to a target that supports them."""
        own = vars(self._optimizer)
        obeys = getattr(target, "_step_supports_amp_scaling", False)
        moved = {name: own.pop(name) for name in _SCALING if obeys and name in own}
        for name, value in moved.items():
            setattr(target, name, value)
        try:
            yield
        finally:
            for name in moved:
                delattr(target, name)
            own.update(moved)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients with the target's method."""
        self._route_fused_step()
        if self.target is None:
            self.own_zero_grad(set_to_none)
        else:
            self.target.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and notify the target."""
        self._load(state_dict)
        if self.target is not None:
            self.target.state_loaded()


def route_of(optimizer: torch.optim.Optimizer) -> OptimizerRoute:
    """Return the route of an optimizer; create it on first use."""
    found = vars(optimizer).get(_KEY)
    if found is None:
        found = vars(optimizer)[_KEY] = OptimizerRoute(optimizer)
    return cast("OptimizerRoute", found)


def _step(optimizer: torch.optim.Optimizer, closure: Closure | None = None) -> Any:
    return route_of(optimizer).step(closure)


class RoutedOptimizer(TransparentOptimizerWrapper):
    """View of a redirected optimizer that makes its original steps, without certain parameters.

    Args:
        optimizer: The optimizer, whose calls are routed.
        left_out: Ids of parameters to hide from wrappers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, left_out: frozenset[int]) -> None:
        self._route, self._left_out = route_of(optimizer), left_out
        super().__init__(optimizer)
        self._initialized = True

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:
        groups = self._wrapped.param_groups
        if not self._left_out:
            return groups
        return [
            {**group, "params": [p for p in group["params"] if id(p) not in self._left_out]}
            for group in groups
        ]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore the assignment by torch's constructor: the groups are those of the optimizer."""

    @override
    def step(self, closure: Closure | None = None) -> Any:
        return self._route.own_step(closure)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._route.own_zero_grad(set_to_none)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._initialized:
            self._wrapped.add_param_group(param_group)
