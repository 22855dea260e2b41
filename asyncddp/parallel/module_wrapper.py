"""Base class of module wrappers that keep the wrapped module's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import Self

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class TransparentModuleWrapper(torch.nn.Module):
    """Module wrapper that adds no name prefix: parameters, buffers and modules are the model's.

    Example:
        >>> wrapper = TransparentModuleWrapper(torch.nn.Linear(1, 1))
        >>> [name for name, _ in wrapper.named_parameters()]
        ['weight', 'bias']
    """

    module: torch.nn.Module

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "module", model)  # not as a submodule, which would be a prefix
        for shared in _SHARED:
            self.__dict__[shared] = getattr(model, shared)

    def train(self, mode: bool = True) -> Self:
        """Set training mode of the wrapper and the model."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, under the model's names."""
        return self.module.state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Iterate over the model and its submodules."""
        yield from self.module.named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
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
