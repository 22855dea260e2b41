"""Model of known bytes and computing time, for steps over a network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.network.simulated_accelerator import SimulatedAccelerator

__all__ = ["BATCH", "SyntheticWorkload", "build"]

BATCH = 4
"""Samples of a rank in a step."""


@dataclass(frozen=True)
class SyntheticWorkload:
    """Size and computing time of a synthetic model's step.

    Attributes:
        layers: Square linear layers without bias.
        width: Inputs and outputs of each.
        accelerator: Seconds for which the processor is idle in a step, a third of them in forward,
            as it is while an accelerator computes; evenly spread over the layers.
        buckets: Messages into which the model is cut, by every method that cuts it.
    """

    layers: int
    width: int
    accelerator: float
    buckets: int

    @property
    def nbytes(self) -> int:
        """Bytes of the model, and of its gradients."""
        return self.layers * self.width**2 * 4

    @property
    def bucket_mb(self) -> float:
        """Size of a bucket in MiB."""
        return self.nbytes / self.buckets / 2**20


def build(workload: SyntheticWorkload, rank: int) -> tuple[torch.nn.Sequential, torch.Tensor]:
    """Make the model, equal on all ranks, and this rank's batch."""
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(workload.layers):
        parts.append(torch.nn.Linear(workload.width, workload.width, bias=False))
        parts.append(SimulatedAccelerator(workload.accelerator / 3 / workload.layers))
        parts.append(torch.nn.Tanh())
    torch.manual_seed(rank)
    return torch.nn.Sequential(*parts), torch.randn(BATCH, workload.width)
