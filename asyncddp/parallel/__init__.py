"""DecentralizedDataParallel, a model wrapper that trains in its backward pass, and samplers."""

from asyncddp.parallel.decentralized_data_parallel import DecentralizedDataParallel
from asyncddp.parallel.load_balancing_sampler import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from asyncddp.parallel.random_batch_sampler import LocalStepRandomBatchSampler

__all__ = [
    "DecentralizedDataParallel",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "LocalStepRandomBatchSampler",
]
