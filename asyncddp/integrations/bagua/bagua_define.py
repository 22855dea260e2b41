"""Bagua's ``bagua.bagua_define``: enum of the algorithms of Bagua's old API."""

from asyncddp.integrations.bagua.torch_api.distributed_define import DistributedAlgorithm

__all__ = ["DistributedAlgorithm"]
