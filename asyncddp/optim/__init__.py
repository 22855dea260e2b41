"""DistributedOptimizer and its variants; synchronisation and averaging of models and states.

Here belongs what wraps a torch optimizer, and what brings models to equal or averaged values.
Users call it, and ``checkpoint`` and ``integrations``. The user's own optimizer makes every
update, and at one rank the result is that of plain torch.
"""

from asyncddp.optim.average_models import average_model, consensus_distance
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.fixed_algorithm_optimizers import (
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
from asyncddp.optim.parameter_sync import allreduce_parameters, broadcast_parameters
from asyncddp.optim.state_broadcast import broadcast_optimizer_state

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
