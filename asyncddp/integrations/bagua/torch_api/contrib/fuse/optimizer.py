"""Bagua's ``bagua.torch_api.contrib.fuse.optimizer``: ``fuse_optimizer``."""

from __future__ import annotations

import torch

from asyncddp.optim.fused_optimizer import fuse_optimizer

__all__ = ["fuse_optimizer", "is_fused_optimizer"]


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has a ``fuse_step()``.

    Args:
        optimizer: The optimizer.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        >>> is_fused_optimizer(optimizer), is_fused_optimizer(fuse_optimizer(optimizer))
        (False, True)
    """
    return hasattr(optimizer, "fuse_step")
