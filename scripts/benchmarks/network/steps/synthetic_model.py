"""Model of known bytes and computing time, and the methods by which it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.network.simulated_accelerator import SimulatedAccelerator
from benchmarks.training_models import Workload, squares

LOCAL = "local step"
DDP, MPI_AFTER, CENTRAL = "DDP gloo", "MPI Allreduce after backward", "gradient_allreduce"
AWC, ATC, ATC_BACKWARD = "one-peer AWC", "one-peer ATC", "one-peer ATC in backward"
ONE_PEER = (AWC, ATC, ATC_BACKWARD)
GLOO_SUM, MPI_SUM = "gloo all_reduce", "MPI Allreduce"
OUR_SUM, OUR_MIX = "asyncddp allreduce", "asyncddp neighbor_allreduce, one peer"
ALONE = {DDP: GLOO_SUM, MPI_AFTER: MPI_SUM, CENTRAL: OUR_SUM, **dict.fromkeys(ONE_PEER, OUR_MIX)}
"""The communication of each method by itself."""
BATCH = 4
"""Samples of a rank in a step."""
_RATE = 1e-3


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

    def model(self) -> Workload:
        """Return what is trained: Linear, the accelerator's share, Tanh for each layer."""
        share = self.accelerator / 3 / self.layers
        plain = partial(torch.optim.SGD, lr=_RATE)

        def between() -> list[torch.nn.Module]:
            return [SimulatedAccelerator(share), torch.nn.Tanh()]

        return squares(self.layers, self.width, plain, between)
