"""Gradient hooks that hold their owner weakly, and the table of which wrapper owns a parameter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from weakref import WeakMethod, WeakSet

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary


class WeakMethodHook:
    """Hook that calls a method by weak reference; does nothing if the object is gone.

    Copies and pickles of it do nothing either, so that a model that is copied or saved does not
    take its optimizer along, and an optimizer that is dropped no longer runs hooks.
    """

    def __init__(self, method: Callable[..., None] | None = None, *bound: Any) -> None:
        self._method = None if method is None else WeakMethod(method)
        self._bound = bound

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> None:
        """Call the method, if its object is still there."""
        method = None if self._method is None else self._method()
        if method is not None:
            method(*self._bound, *args)

    def __reduce__(self) -> tuple[type[WeakMethodHook], tuple[()]]:
        return WeakMethodHook, ()


def hook_backward(output: Any, hook: WeakMethodHook) -> None:
    """Register a hook that runs when a backward pass reaches a model's output.

    That is the outermost pass, also where the model runs backward passes of its own inside.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(hook)  # type: ignore[no-untyped-call]


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove registered hooks, and empty the list of their handles."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


class GradientHookOwner(Protocol):
    """Interface of a wrapper that has gradient hooks on parameters and sends parameters."""

    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads a parameter any more."""
        ...

    def detach(self) -> None:
        """Remove all hooks."""
        ...


class _HookOwnerTable:
    """Process-wide weak table, with a lock, from parameters to the wrappers that hook them."""

    lock = threading.Lock()
    table: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: GradientHookOwner) -> None:
    """Make an object the owner of these parameters' hooks; earlier owners remove theirs.

    An earlier wrapper of an optimizer keeps working without overlap; one of a module no longer
    trains.
    """
    with _HookOwnerTable.lock:
        for parameter in parameters:
            before: WeakSet[GradientHookOwner] | None = _HookOwnerTable.table.get(parameter)  # type: ignore[no-untyped-call]
            for other in list(before or ()):
                other.detach()
            _HookOwnerTable.table[parameter] = WeakSet([owner])


def wait_for_reads(parameters: Iterable[torch.Tensor]) -> None:
    """Wait until no message or peer reads these parameters, so that they may be changed."""
    for owner in {owner: None for parameter in parameters for owner in _owners_of(parameter)}:
        owner.wait_for_reads()


def _owners_of(parameter: torch.Tensor) -> Iterator[GradientHookOwner]:
    with _HookOwnerTable.lock:
        found: WeakSet[GradientHookOwner] | None = _HookOwnerTable.table.get(parameter)  # type: ignore[no-untyped-call]
    yield from list(found or ())
