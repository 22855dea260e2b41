"""Hooks that hold their owner by weak reference, and do nothing in copies of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class WeakMethodHook:
    """Hook that calls a method by weak reference; does nothing if the object is gone.

    Copies and pickles of it do nothing either, so that a model that is copied or saved does not
    take its optimizer along, and an optimizer that is dropped no longer runs hooks.

    Args:
        method: A bound method, or None for a hook that does nothing.
        *bound: First arguments of every call.
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
