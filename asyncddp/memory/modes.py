"""What a user may have switched on in torch around a call, kept out of what the library keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["inference_mode", "normal_mode"]

_NOTHING = nullcontext()


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
