"""Bagua's ``bagua.bagua_define``, where the old API has its enumeration of algorithms."""

from asyncddp.integrations.bagua.torch_api.distributed_define import DistributedAlgorithm

__all__ = ["DistributedAlgorithm"]
