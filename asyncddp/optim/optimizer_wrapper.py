"""Base class of optimizers that share groups, state and options with the optimizer they wrap."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class TransparentOptimizerWrapper(torch.optim.Optimizer):
    """Optimizer wrapper whose ``param_groups``, ``state`` and ``defaults`` are the wrapped one's.

    Args:
        optimizer: The optimizer inside.
    """

    _initialized = False
    """Set by a subclass at the end of its constructor: what torch's assigns before is ignored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._wrapped = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

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
        """Replace the wrapped optimizer's parameter groups."""
        if self._initialized:
            self._wrapped.param_groups = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State of the wrapped optimizer."""
        return self._wrapped.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        """Replace the wrapped optimizer's state."""
        if self._initialized:
            self._wrapped.state = state

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the wrapped optimizer has, such as its ``train()``."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} belongs to a running world and cannot be copied or pickled; "
            "keep its state_dict() and wrap a new optimizer"
        )
