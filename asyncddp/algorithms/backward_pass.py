"""Backward pass of a model: detects its start and end, and counts the parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from asyncddp.algorithms.gradient_hooks import WeakMethodHook


class BackwardPass:
    """Outermost backward pass of a model: detects begin and end, counts each parameter's gradients.

    A parameter may get its gradient in several pieces, from nested backward passes, such as those
    of reentrant checkpoints or reversible layers. Their number is not known before the end, but is
    mostly the same as in earlier passes.

    Args:
        on_end: Method to call at the end of a pass; its object is referenced weakly.

    Attributes:
        open: Whether a pass is in progress.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = WeakMethodHook(on_end)
        self.open = False
        self._counts: dict[int, int] = {}
        self._most: dict[int, int] = {}
        """Maximum number of gradients that each parameter got in any finished pass."""

    def hook(self, output: Any) -> None:
        """Register a hook that detects when a backward pass reaches a model's output.

        That is the outermost pass, even if the model runs backward passes of its own inside.
        """
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(WeakMethodHook(self.begin))  # type: ignore[no-untyped-call]

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """Begin a pass, unless one is in progress."""
        if not self.open:
            self.open = True
            self._counts.clear()
            Variable._execution_engine.queue_callback(WeakMethodHook(self._end))

    def count(self, index: int) -> int:
        """Count a gradient of a parameter; return its number of gradients in this pass."""
        self.begin()
        count = self._counts[index] = self._counts.get(index, 0) + 1
        return count

    def reached(self, index: int) -> bool:
        """Return whether a parameter got a gradient in this pass."""
        return index in self._counts

    def counted(self) -> list[int]:
        """Return the parameters that got gradients in this pass, in the order of their first."""
        return list(self._counts)

    def is_last(self, index: int) -> bool:
        """Return whether a parameter has as many gradients as the maximum of earlier passes."""
        return self._counts[index] == self._most.get(index)

    def _end(self) -> None:
        self.open = False
        for index, count in self._counts.items():
            self._most[index] = max(count, self._most.get(index, 0))
        self._on_end()

    def forget_failed(self) -> bool:
        """Discard a failed pass, which never ends; return whether there was one."""
        failed = self.open and torch._C._current_graph_task_id() == -1
        if failed:
            self.open = False
        return failed

    def forget_counts(self) -> None:
        """Reset the counts of gradients, since parameters get new indices."""
        self._counts.clear()
        self._most.clear()
