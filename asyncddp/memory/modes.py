"""What a user may have switched on in torch around a call, kept out of what the library keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C import _functorch

from asyncddp.errors import ArgumentError

__all__ = ["inference_mode", "normal_mode", "refuse_transforms", "transforming"]

_NOTHING = nullcontext()
transforming: Callable[[], object | None] = _functorch.peek_interpreter_stack
"""What is not None within a function that ``torch.func`` transforms."""


def normal_mode() -> AbstractContextManager[object]:
    """Leave ``torch.inference_mode``: what is made in here is an ordinary tensor.

    A tensor that is made in inference mode is refused by everything in place outside of it, and so
    must not be kept for later calls.

    Example:
        >>> with torch.inference_mode(), normal_mode():
        ...     torch.zeros(1).is_inference()
        False
    """
    return inference_mode(enabled=False)


def inference_mode(*, enabled: bool) -> AbstractContextManager[object]:
    """Enter or leave ``torch.inference_mode``; costs next to nothing where it is so already."""
    if torch.is_inference_mode_enabled() == enabled:
        return _NOTHING
    return torch.inference_mode(enabled)


def refuse_transforms(verb: str) -> None:
    """Insist that no ``torch.func`` transform is at work, whose tensors have no memory to send.

    Raises:
        ArgumentError: One is.
    """
    if transforming() is not None:
        raise ArgumentError(
            f"{verb}: called within a function that torch.func transforms (vmap, grad, jvp, ...); "
            "expected a call outside of it. Call the transformed function first, and pass its "
            f"result to {verb}"
        )
