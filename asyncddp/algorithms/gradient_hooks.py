"""Gradient hooks that refer weakly to their owner, and a lookup of the owner by parameter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.torch_modes import uncompiled


class WeakMethodHook:
    """Hook that calls a method of a weakly referenced object, if the object still exists.

    Copies and pickles of it do nothing, so that copying or saving a model does not include its
    optimizer, and a deleted optimizer runs no hooks.
    """

    def __init__(self, method: Callable[..., None] | None = None, *bound: Any) -> None:
        self._method = None if method is None else WeakMethod(method)
        self._bound = bound

    @uncompiled
    def __call__(self, *args: Any) -> None:
        """Call the method if its object still exists."""
        method = None if self._method is None else self._method()
        if method is not None:
            method(*self._bound, *args)

    def __reduce__(self) -> tuple[type[WeakMethodHook], tuple[()]]:
        return WeakMethodHook, ()


def hook_gradients(
    parameters: Iterable[torch.Tensor], method: Callable[[int, torch.Tensor], None]
) -> list[RemovableHandle]:
    """Register hooks that call a method with index and parameter when its gradient is ready."""
    return [
        parameter.register_post_accumulate_grad_hook(WeakMethodHook(method, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove registered hooks, and empty the list of their handles."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


class GradientHookedWrapper(Protocol):
    """Interface of an optimizer or model wrapper that owns gradient hooks of parameters."""

    @property
    def averager(self) -> ModelAverager | None:
        """Averager of the parameters; None if another library averages them."""

    def wait_for_reads(self) -> None:
        """Wait until messages and peers have finished reading the parameters."""

    def detach(self) -> None:
        """Remove all hooks."""


_lock = threading.Lock()
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weak reference to the owner of each parameter's hooks; guarded by the lock."""


def _owner_of(parameter: torch.Tensor) -> GradientHookedWrapper | None:
    found: ref[GradientHookedWrapper] | None = _owners.get(parameter)  # type: ignore[no-untyped-call]
    return None if found is None else found()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: GradientHookedWrapper) -> None:
    """Make an object the owner of these parameters' hooks; previous owners remove their hooks.

    A previous optimizer wrapper keeps working without overlap; a previous module wrapper no longer
    trains.
    """
    with _lock:
        for parameter in parameters:
            before = _owner_of(parameter)
            if before is not None:
                before.detach()
            _owners[parameter] = ref(owner)


def _owners_of(parameters: Iterable[torch.Tensor]) -> list[GradientHookedWrapper]:
    with _lock:
        owners = dict.fromkeys(map(_owner_of, parameters))
    return [owner for owner in owners if owner is not None]


def wait_for_reads(parameters: Iterable[torch.Tensor]) -> None:
    """Wait until messages and peers have finished reading parameters, which may then be changed."""
    for owner in _owners_of(parameters):
        owner.wait_for_reads()


def averagers_of(parameters: Iterable[torch.Tensor]) -> list[ModelAverager]:
    """Return the averagers of these parameters."""
    found = [owner.averager for owner in _owners_of(parameters)]
    return [averager for averager in found if averager is not None]
