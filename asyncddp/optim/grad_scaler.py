"""Support of ``torch.amp.GradScaler`` by the optimizer wrapper: overflow check and unscaling."""

from __future__ import annotations

from typing import Any

import torch


def found_infinities(optimizer: Any) -> bool:
    """Return whether a GradScaler has found infinities, by setting ``optimizer.found_inf``."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def unscale_gradients(optimizer: Any) -> None:
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
