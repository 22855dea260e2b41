"""Subclasses of DistributedOptimizer, each with the algorithm or communication in its name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import ClassVar

import torch

from asyncddp.context import current
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from topology import GraphOrSchedule

_Models = torch.nn.Module | Iterable[torch.nn.Module]


class DistributedAdaptWithCombineOptimizer(DistributedOptimizer):
    """Optimizer wrapper that averages parameters during forward and backward.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"``.
    """

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
    """Optimizer wrapper that averages parameters after the optimizer's step.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_then_combine"``.
    """

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


class _AdaptWithCombineAlongTopology(DistributedAdaptWithCombineOptimizer):
    """Base class of wrappers whose communication is a class attribute."""

    _communication: ClassVar[str]

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
            self._communication,
            num_steps_per_communication,
            topology=topology,
            bucket_size_in_mb=bucket_size_in_mb,
        )


class DistributedNeighborAllreduceOptimizer(_AdaptWithCombineAlongTopology):
    """Optimizer wrapper that averages parameters with neighbours during forward and backward.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"`` and
    ``communication="neighbor_allreduce"``.
    """

    _communication = "neighbor_allreduce"


class DistributedHierarchicalNeighborAllreduceOptimizer(_AdaptWithCombineAlongTopology):
    """Optimizer wrapper that averages parameters per machine, then with neighbour machines.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"`` and
    ``communication="hierarchical_neighbor_allreduce"``.
    """

    _communication = "hierarchical_neighbor_allreduce"


class DistributedAllreduceOptimizer(DistributedAdaptWithCombineOptimizer):
    """Optimizer wrapper that averages parameters (not gradients) over all ranks.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"`` and
    ``communication="allreduce"``, as the name means in BlueFog. Horovod and DistributedDataParallel
    average gradients, as :class:`DistributedGradientAllreduceOptimizer` does; a warning on rank 0
    says so.
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
    """Optimizer wrapper that averages gradients over all ranks, as Horovod does.

    It is :class:`DistributedOptimizer` with ``algorithm="gradient_allreduce"``.
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
            "gradient_allreduce",
            num_steps_per_communication=num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
        )


class _OneSidedOptimizer(DistributedOptimizer):
    """Base class of wrappers whose one-sided algorithm is a class attribute."""

    _algorithm: ClassVar[str]

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
            self._algorithm,
            topology=topology,
            num_steps_per_communication=num_steps_per_communication,
            bucket_size_in_mb=bucket_size_in_mb,
            max_staleness=max_staleness,
            window_prefix=window_prefix,
        )


class DistributedWinPutOptimizer(_OneSidedOptimizer):
    """Optimizer wrapper that averages parameters through puts into neighbours' windows.

    It is :class:`DistributedOptimizer` with ``algorithm="win_put"``.
    """

    _algorithm = "win_put"


class DistributedPullGetOptimizer(_OneSidedOptimizer):
    """Optimizer wrapper that averages with parameters read from neighbours' windows.

    It is :class:`DistributedOptimizer` with ``algorithm="pull_get"``.
    """

    _algorithm = "pull_get"


class DistributedPushSumOptimizer(DistributedOptimizer):
    """Optimizer wrapper that averages parameters by push-sum, on any connected digraph.

    It is :class:`DistributedOptimizer` with ``algorithm="push_sum"``.
    """

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
