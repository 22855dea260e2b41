"""Bagua's ``bagua.torch_api``; importing it adds methods to modules and tensors, as with Bagua."""

from asyncddp.integrations.bagua.torch_api import (
    algorithms,
    checkpoint,
    communication,
    contrib,
    data_parallel,
    env,
    tensor,
)
from asyncddp.integrations.bagua.torch_api.communication import *  # noqa: F403
from asyncddp.integrations.bagua.torch_api.data_parallel import module_methods
from asyncddp.integrations.bagua.torch_api.data_parallel.module_methods import (
    BaguaModule,
    with_bagua,
)
from asyncddp.integrations.bagua.torch_api.distributed import DistributedAlgorithm, bagua_init
from asyncddp.integrations.bagua.torch_api.env import *  # noqa: F403
from asyncddp.integrations.bagua.torch_api.tensor import BaguaTensor

__all__ = [
    "BaguaModule", "BaguaTensor", "DistributedAlgorithm", "algorithms", "bagua_init", "checkpoint",
    "contrib", "data_parallel", "with_bagua", *communication.__all__, *env.__all__,
]  # fmt: skip

tensor.add_methods()
module_methods.add_methods()
