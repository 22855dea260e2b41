"""Subclasses of DistributedOptimizer with the algorithm or communication fixed by the name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from asyncddp.context import current
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from topology import GraphOrSchedule

_Models = torch.nn.Module | Iterable[torch.nn.Module]


class DistributedAdaptWithCombineOptimizer(DistributedOptimizer):
    """Optimizer wrapper with ``algorithm="adapt_with_combine"``: averages during backward."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        communication: str | None = None,
        num_steps_per_communication: int = 1,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "adapt_with_combine",
            communication,
            topology,
            num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
        )


class DistributedAdaptThenCombineOptimizer(DistributedOptimizer):
    """Optimizer wrapper with ``algorithm="adapt_then_combine"``: steps, then averages."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        communication: str | None = None,
        num_steps_per_communication: int = 1,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
        update_in_backward: bool = False,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "adapt_then_combine",
            communication,
            topology,
            num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
            update_in_backward=update_in_backward,
        )


class DistributedNeighborAllreduceOptimizer(DistributedAdaptWithCombineOptimizer):
    """Optimizer wrapper with ``adapt_with_combine`` among neighbours in the graph of ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "neighbor_allreduce",
            num_steps_per_communication,
            topology=topology,
            bucket_size_in_mb=bucket_size_in_mb,
        )


class DistributedHierarchicalNeighborAllreduceOptimizer(DistributedAdaptWithCombineOptimizer):
    """Optimizer wrapper with ``adapt_with_combine`` on machine means, in the graph of machines."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "hierarchical_neighbor_allreduce",
            num_steps_per_communication,
            topology=topology,
            bucket_size_in_mb=bucket_size_in_mb,
        )


class DistributedAllreduceOptimizer(DistributedAdaptWithCombineOptimizer):
    """Optimizer wrapper with ``adapt_with_combine``: averages parameters (not gradients) globally.

    That is what the name means in BlueFog. Horovod and DistributedDataParallel average gradients,
    as :class:`DistributedGradientAllreduceOptimizer` does; a warning on rank 0 says so.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        *,
        bucket_size_in_mb: float = 25,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "allreduce",
            num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
        )
        if current().rank == 0:
            warnings.warn(
                "DistributedAllreduceOptimizer averages parameters over all ranks, as in BlueFog. "
                "To average gradients, as Horovod and DistributedDataParallel do, use "
                "DistributedOptimizer(optimizer, model, algorithm='gradient_allreduce'), which is "
                "DistributedGradientAllreduceOptimizer; if you mean parameters, use "
                "DistributedOptimizer(optimizer, model, algorithm='adapt_with_combine', "
                "communication='allreduce'), which does not warn",
                stacklevel=2,
            )


class DistributedGradientAllreduceOptimizer(DistributedOptimizer):
    """Optimizer wrapper with ``algorithm="gradient_allreduce"``: averages gradients globally."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        *,
        bucket_size_in_mb: float = 25,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "gradient_allreduce",
            num_steps_per_communication=num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
        )


class DistributedWinPutOptimizer(DistributedOptimizer):
    """Optimizer wrapper with ``algorithm="win_put"``: puts parameters into neighbours' windows."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "win_put",
            topology=topology,
            num_steps_per_communication=num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
            max_staleness=max_staleness,
            window_prefix=window_prefix,
        )


class DistributedPullGetOptimizer(DistributedOptimizer):
    """Optimizer wrapper with ``algorithm="pull_get"``: gets parameters from neighbours' windows."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "pull_get",
            topology=topology,
            num_steps_per_communication=num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
            max_staleness=max_staleness,
            window_prefix=window_prefix,
        )


class DistributedPushSumOptimizer(DistributedOptimizer):
    """Optimizer wrapper with ``algorithm="push_sum"``: push-sum on any connected digraph."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        *,
        topology: GraphOrSchedule | None = None,
        bucket_size_in_mb: float = 25,
        max_staleness: int | None = None,
        scale_steps: bool | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            "push_sum",
            topology=topology,
            num_steps_per_communication=num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
            max_staleness=max_staleness,
            window_prefix=window_prefix,
            scale_steps=scale_steps,
        )
