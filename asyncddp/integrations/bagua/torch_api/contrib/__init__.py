"""Bagua's ``bagua.torch_api.contrib``: samplers, ``fuse_optimizer`` and ``SyncBatchNorm``."""

from asyncddp.integrations.bagua.missing_names import refusing
from asyncddp.integrations.bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer
from asyncddp.integrations.bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from asyncddp.integrations.bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

__all__ = [
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "fuse_optimizer",
]

__getattr__ = refusing(__name__)
