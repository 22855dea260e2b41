"""Base classes of DistributedOptimizer, for access to the wrapped optimizer and to its windows."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncddp.algorithms.neighbor_progress import NeighborProgressMixin
from asyncddp.errors import UsageError


class TransparentOptimizerWrapper(torch.optim.Optimizer):
    """Wrapper of an optimizer that shares its ``param_groups``, ``state`` and ``defaults``."""

    _update: Callable[..., Any] | None = None
    """Makes the update in place of the wrapped optimizer's step."""
    _initialized = False
    """Set by a subclass at the end of its constructor: what torch's assigns before is ignored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._wrapped = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def _patch_step_function(self) -> None:
        """Make ``step`` run this object's own hooks, and torch's global hooks once."""
        kind: Any = type(self)
        if not getattr(kind.step, "hooked", False):
            kind.step = _with_own_hooks(kind.step)
        super()._patch_step_function()

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer."""
        return self._wrapped

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._initialized:
            self._wrapped.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State of the wrapped optimizer."""
        return self._wrapped.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if self._initialized:
            self._wrapped.state = state

    @contextmanager
    def replaced_update(self, update: Callable[..., Any]) -> Iterator[None]:
        """Replace the parameter update of steps within a ``with`` block."""
        self._update = update
        try:
            yield
        finally:
            self._update = None

    def _step_wrapped(self, closure: Callable[[], Any] | None) -> Any:
        """Run the wrapped optimizer's step, unless a GradScaler has found infinities."""
        found = getattr(self, "found_inf", None)
        if found is not None and self._agreed(bool(found)):
            return None
        scale = getattr(self, "grad_scale", None)
        if scale is not None:  # set by a GradScaler that leaves unscaling to the step
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        with torch.no_grad():
                            parameter.grad.mul_(inverse.to(parameter.grad.device))
        update = self._update or self._wrapped.step
        if closure is None:
            self._before_update()
            return update()

        def evaluate() -> Any:
            loss = closure()
            self._before_update()
            return loss

        return update(evaluate)

    def _agreed(self, flag: bool) -> bool:
        """Return whether a flag is set, which ranks that must decide alike agree on."""
        return flag

    def _before_update(self) -> None:
        """Hook: the wrapped optimizer is about to use the gradients."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, such as its ``train()``.

        Methods that perform part of a step, such as ``first_step()``, raise a UsageError instead.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name == "fuse_step":  # of the wrapped optimizer it would not average
            raise AttributeError(
                f"{type(self).__name__} has no fuse_step(); give the wrapper to fuse_optimizer(), "
                "not the optimizer that it wraps"
            )
        found = getattr(self._wrapped, name)
        if "step" not in name or not callable(found):
            return found

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise UsageError(
                f"{type(self).__name__}.{name}(): {type(self._wrapped).__name__}'s own {name}() "
                "would average nothing; call optimizer.step(closure) in place of it, with a "
                "closure that evaluates the loss, calls backward() and returns the loss, and "
                f"from which {type(self._wrapped).__name__}.step() makes a whole step"
            )

        return refuse

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} belongs to a running world and cannot be copied or pickled; "
            "keep its state_dict() and wrap a new optimizer"
        )


def _with_own_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step function that runs the hooks registered on its optimizer only."""

    @functools.wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        own = args[0]
        for before in own._optimizer_step_pre_hooks.values():
            args, kwargs = before(own, args, kwargs) or (args, kwargs)
        result = step(*args, **kwargs)
        for after in own._optimizer_step_post_hooks.values():
            after(own, args, kwargs)
        return result

    hooked.hooked = True  # type: ignore[attr-defined]  # by which torch knows it
    return hooked


class WindowMethodsMixin(NeighborProgressMixin):
    """Mixin of DistributedOptimizer for windows: barriers, bounded staleness and freeing.

    With algorithms that use no windows it has no effect.
    """

    @property
    def force_barrier(self) -> bool:
        """True if ranks synchronise before and after each averaging, so none is asynchronous.

        False at first; may be set before any round, on all ranks.
        """
        return self._averager.force_barrier

    @force_barrier.setter
    def force_barrier(self, value: bool) -> None:
        self._averager.force_barrier = value

    @property
    def max_staleness(self) -> int | None:
        """Number of steps that a neighbour may lag before this rank waits, or None."""
        return self._averager.max_staleness

    def unregister_windows(self) -> None:
        """Free the windows; collective.

        The next averaging creates windows again, for the topology in use then; that is collective
        too. Without this call the windows are freed with the world, because peers may read them.

        Raises:
            WaitTimeoutError: A rank has not come by the deadline.
        """
        self._averager.windows.free()
