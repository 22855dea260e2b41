"""Our side of ``torch.amp.GradScaler``: skip the update where it has found infinities."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["overflowed", "unscale"]


def overflowed(optimizer: Any) -> bool:
    """Whether a GradScaler, which sets ``optimizer.found_inf``, wants the update skipped."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscale(optimizer: Any) -> None:
    """Divide the gradients by ``optimizer.grad_scale``, where a GradScaler has set that."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
