"""Layer that takes time and leaves the processor free, as an accelerator does."""

from __future__ import annotations

import time
from typing import Any

import torch


class _SleepFunction(torch.autograd.Function):
    """Identity function that sleeps: once in forward, twice in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class SimulatedAccelerator(torch.nn.Module):
    """Layer that simulates computing on an accelerator by sleeping.

    Args:
        seconds: For forward; backward takes twice as long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Give the value back, later."""
        waited: torch.Tensor = _SleepFunction.apply(value, self.seconds)  # type: ignore[no-untyped-call]
        return waited
