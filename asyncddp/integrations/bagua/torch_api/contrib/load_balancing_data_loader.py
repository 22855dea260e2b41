"""Bagua's ``bagua.torch_api.contrib.load_balancing_data_loader``: samplers that balance load."""

from asyncddp.data.load_balancing_sampler import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
