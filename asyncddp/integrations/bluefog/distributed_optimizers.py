"""BlueFog's functions that wrap an optimizer, with its names, arguments and defaults."""

from __future__ import annotations

import warnings

import torch

from asyncddp.integrations.bluefog.bluefog_optimizer import (
    BluefogOptimizer,
    CommunicationType,
    Models,
)

__all__ = [
    "CommunicationType", "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer", "DistributedAllreduceOptimizer",
    "DistributedBluefogOptimizer", "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer", "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer", "DistributedPushSumOptimizer", "DistributedWinPutOptimizer",
]  # fmt: skip

_AWC, _ATC = "adapt_with_combine", "adapt_then_combine"
_PRESENT = "DistributedAdaptWithCombineOptimizer with communication_type=bf."
_NEAR = 0  # averagings; over there a put waits until its target is in MPI, which keeps ranks near


def DistributedGradientAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Average all ranks' gradients; see :class:`BluefogOptimizer` for the arguments."""
    steps = num_steps_per_communication
    return BluefogOptimizer(optimizer, model, "gradient_allreduce", None, steps)


def DistributedAdaptWithCombineOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> BluefogOptimizer:
    """Average parameters while the gradient is computed."""
    return BluefogOptimizer(optimizer, model, _AWC, communication_type, num_steps_per_communication)


def DistributedAdaptThenCombineOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> BluefogOptimizer:
    """Make the optimizer's step, then average parameters."""
    return BluefogOptimizer(optimizer, model, _ATC, communication_type, num_steps_per_communication)


def DistributedWinPutOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> BluefogOptimizer:
    """Put parameters into the neighbours' windows; wait only for neighbours that are behind."""
    steps = num_steps_per_communication
    return BluefogOptimizer(optimizer, model, "win_put", None, steps, window_prefix, _NEAR)


def DistributedPullGetOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Get parameters from the neighbours' windows; wait only for neighbours that are behind."""
    steps = num_steps_per_communication
    return BluefogOptimizer(optimizer, model, "pull_get", None, steps, None, _NEAR)


def DistributedPushSumOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Stochastic gradient push; ranks meet in each round while ``force_barrier`` is True."""
    made = BluefogOptimizer(optimizer, model, "push_sum", None, num_steps_per_communication)
    made.force_barrier = True
    return made


def DistributedBluefogOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: the name of :func:`DistributedWinPutOptimizer` before BlueFog 0.3."""
    _deprecated("DistributedBluefogOptimizer", "DistributedWinPutOptimizer")
    return DistributedWinPutOptimizer(optimizer, model, num_steps_per_communication)


def DistributedAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: adapt-with-combine with all ranks."""
    kind = CommunicationType.allreduce
    _deprecated("DistributedAllreduceOptimizer", f"{_PRESENT}{kind}")
    return BluefogOptimizer(optimizer, model, _AWC, kind, num_steps_per_communication)


def DistributedNeighborAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: adapt-with-combine with the neighbours."""
    kind = CommunicationType.neighbor_allreduce
    _deprecated("DistributedNeighborAllreduceOptimizer", f"{_PRESENT}{kind}")
    return BluefogOptimizer(optimizer, model, _AWC, kind, num_steps_per_communication)


def DistributedHierarchicalNeighborAllreduceOptimizer(  # noqa: N802 - BlueFog's name
    optimizer: torch.optim.Optimizer, model: Models, num_steps_per_communication: int = 1
) -> BluefogOptimizer:
    """Deprecated: adapt-with-combine with the mean of each machine, between machines."""
    kind = CommunicationType.hierarchical_neighbor_allreduce
    _deprecated("DistributedHierarchicalNeighborAllreduceOptimizer", f"{_PRESENT}{kind}")
    return BluefogOptimizer(optimizer, model, _AWC, kind, num_steps_per_communication)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(
        f"{name} is an older name: use {instead}", PendingDeprecationWarning, stacklevel=3
    )
