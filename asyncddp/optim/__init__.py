"""The optimizer wrapper for all methods; equal parameters and state; the average model."""

from __future__ import annotations

from asyncddp.optim.averages import average_model, consensus_distance
from asyncddp.optim.constructors import (
    DistributedAdaptThenCombineOptimizer,
    DistributedAdaptWithCombineOptimizer,
    DistributedAllreduceOptimizer,
    DistributedGradientAllreduceOptimizer,
    DistributedHierarchicalNeighborAllreduceOptimizer,
    DistributedNeighborAllreduceOptimizer,
    DistributedPullGetOptimizer,
    DistributedPushSumOptimizer,
    DistributedWinPutOptimizer,
)
from asyncddp.optim.optimizer import DistributedOptimizer
from asyncddp.optim.parameters import allreduce_parameters, broadcast_parameters
from asyncddp.optim.state import broadcast_optimizer_state

__all__ = [
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedAllreduceOptimizer",
    "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "DistributedNeighborAllreduceOptimizer",
    "DistributedOptimizer",
    "DistributedPullGetOptimizer",
    "DistributedPushSumOptimizer",
    "DistributedWinPutOptimizer",
    "allreduce_parameters",
    "average_model",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "consensus_distance",
]
