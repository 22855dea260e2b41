"""Bagua's ``bagua.bagua_define``: the old API's enum of algorithms."""

from asyncddp.integrations.bagua.torch_api.distributed_define import DistributedAlgorithm

__all__ = ["DistributedAlgorithm"]
