"""Bagua's ``bagua.torch_api.data_parallel``: wrappers that train a model on all ranks."""

from asyncddp.integrations.bagua.torch_api.data_parallel.bagua_distributed import (
    BaguaDistributedDataParallel,
)
from asyncddp.integrations.bagua.torch_api.data_parallel.distributed import (
    DistributedDataParallel,
)

__all__ = ["BaguaDistributedDataParallel", "DistributedDataParallel"]
