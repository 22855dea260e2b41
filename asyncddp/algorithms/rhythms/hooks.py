"""Hooks that do not keep their owner alive, and that copies of a model do not take along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Weakly", "watch"]


class Weakly:
    """Calls a method of an object that may be gone; then, and in copies and pickles, does nothing.

    A model that is copied, saved or averaged does not drag its optimizer along, and an optimizer
    that is dropped no longer listens.

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

    def __reduce__(self) -> tuple[type[Weakly], tuple[()]]:
        return Weakly, ()


def watch(output: Any, bell: Weakly) -> None:
    """Ring when a backward pass comes to what a model has given.

    That is the outermost pass, also where the model makes passes of its own inside.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(bell)  # type: ignore[no-untyped-call]
