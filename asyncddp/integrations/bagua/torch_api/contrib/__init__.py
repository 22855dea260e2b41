"""Bagua's ``bagua.torch_api.contrib``."""

from asyncddp.integrations.bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer
from asyncddp.integrations.bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__ = [
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "fuse_optimizer",
]
