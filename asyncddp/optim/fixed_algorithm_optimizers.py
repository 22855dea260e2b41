"""Subclasses of DistributedOptimizer that each fix one algorithm or one communication."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import ClassVar, TypedDict

import torch
from typing_extensions import Unpack

from asyncddp.context import current
from asyncddp.optim.autotune import Autotune
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.topology import GraphOrSchedule

_Models = torch.nn.Module | Iterable[torch.nn.Module]


class OptimizerOptions(TypedDict, total=False):
    """Options of :class:`asyncddp.DistributedOptimizer` accepted by its subclasses."""

    topology: GraphOrSchedule | None
    bucket_size_in_mb: float
    update_in_backward: bool
    max_staleness: int | None
    scale_steps: bool | None
    communication_buffer_in_mb: float | None
    autotune: bool | Autotune | None
    broadcast: bool


class _FixedAlgorithmOptimizer(DistributedOptimizer):
    """Base class of optimizer wrappers that each fix one averaging algorithm."""

    _algorithm: ClassVar[str]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        communication: str | None = None,
        num_steps_per_communication: int = 1,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            self._algorithm,
            communication,
            num_steps_per_communication=num_steps_per_communication,
            **options,
        )


class DistributedAdaptWithCombineOptimizer(_FixedAlgorithmOptimizer):
    """Optimizer wrapper for adapt-with-combine: averages parameters during forward/backward.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"``.
    """

    _algorithm = "adapt_with_combine"


class DistributedAdaptThenCombineOptimizer(_FixedAlgorithmOptimizer):
    """Optimizer wrapper for adapt-then-combine: averages parameters after the optimizer's step.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_then_combine"``.
    """

    _algorithm = "adapt_then_combine"


class _PresetOptimizer(DistributedOptimizer):
    """Base class of optimizer wrappers with algorithm and communication as class attributes."""

    _algorithm: ClassVar[str] = "adapt_with_combine"
    _communication: ClassVar[str | None] = None
    _warning: ClassVar[str | None] = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: _Models,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            self._algorithm,
            self._communication,
            num_steps_per_communication=num_steps_per_communication,
            window_prefix=window_prefix,
            **options,
        )
        if self._warning is not None and current().rank == 0:
            warnings.warn(self._warning, stacklevel=2)


class DistributedNeighborAllreduceOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages parameters with neighbours during forward and backward.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"`` and
    ``communication="neighbor_allreduce"``.
    """

    _communication = "neighbor_allreduce"


class DistributedHierarchicalNeighborAllreduceOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages parameters per machine, then with neighbour machines.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"`` and
    ``communication="hierarchical_neighbor_allreduce"``.
    """

    _communication = "hierarchical_neighbor_allreduce"


class DistributedGradientAllreduceOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages gradients over all ranks, as Horovod does.

    It is :class:`DistributedOptimizer` with ``algorithm="gradient_allreduce"``.
    """

    _algorithm = "gradient_allreduce"


class DistributedAllreduceOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages parameters (not gradients) over all ranks.

    It is :class:`DistributedOptimizer` with ``algorithm="adapt_with_combine"`` and
    ``communication="allreduce"``, as the name means in BlueFog. Horovod and DistributedDataParallel
    average gradients, as :class:`DistributedGradientAllreduceOptimizer` does; a warning on rank 0
    says so.
    """

    _communication = "allreduce"
    _warning = (
        "DistributedAllreduceOptimizer averages parameters over all ranks, as in BlueFog. To "
        "average gradients, as Horovod and DistributedDataParallel do, use "
        "DistributedOptimizer(optimizer, model, algorithm='gradient_allreduce'), which is "
        "DistributedGradientAllreduceOptimizer; if you mean parameters, use "
        "DistributedOptimizer(optimizer, model, algorithm='adapt_with_combine', "
        "communication='allreduce'), which does not warn"
    )


class DistributedWinPutOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages parameters put into neighbours' windows.

    It is :class:`DistributedOptimizer` with ``algorithm="win_put"``.
    """

    _algorithm = "win_put"


class DistributedPullGetOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages with parameters read from neighbours' windows.

    It is :class:`DistributedOptimizer` with ``algorithm="pull_get"``.
    """

    _algorithm = "pull_get"


class DistributedPushSumOptimizer(_PresetOptimizer):
    """Optimizer wrapper that averages parameters by push-sum, on strongly connected digraphs.

    It is :class:`DistributedOptimizer` with ``algorithm="push_sum"``.
    """

    _algorithm = "push_sum"
