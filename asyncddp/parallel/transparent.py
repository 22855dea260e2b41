"""A module around a module that shows the inner one's parameters under their own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

__all__ = ["Transparent"]

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

T = TypeVar("T", bound="Transparent")


class Transparent(torch.nn.Module):
    """A wrapper that adds no prefix: parameters, buffers and submodules are the model's.

    Args:
        model: The module inside.

    Example:
        >>> [name for name, _ in Transparent(torch.nn.Linear(1, 1)).named_parameters()]
        ['weight', 'bias']
    """

    module: torch.nn.Module

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "module", model)  # not as a submodule, which would be a prefix
        for shared in _SHARED:
            self.__dict__[shared] = getattr(model, shared)

    def train(self: T, mode: bool = True) -> T:
        """Set the model's mode, and the wrapper's."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state, under the model's names."""
        return self.module.state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model and its submodules."""
        yield from self.module.named_modules(*args, **kwargs)

    def apply(self: T, fn: Callable[[torch.nn.Module], None]) -> T:
        """Apply a function to the model and its submodules."""
        self.module.apply(fn)
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} belongs to a running world and cannot be copied or pickled; "
            "copy its module, or keep its state dicts"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"
