"""Bagua's ``bagua.torch_api.distributed``: Bagua's old API, and ``BaguaModule`` of the new one."""

from asyncddp.integrations.bagua.torch_api.data_parallel.module_methods import BaguaModule
from asyncddp.integrations.bagua.torch_api.distributed_define import (
    BucketType,
    Compressor,
    DistributedAlgorithm,
    ReduceOp,
)
from asyncddp.integrations.bagua.torch_api.distributed_module import DistributedModule
from asyncddp.integrations.bagua.torch_api.model_switch_wrapper import (
    ModelSwitchWrapper,
    allreduce_parameters,
    bagua_init,
    broadcast_parameters,
)
from asyncddp.integrations.bagua.torch_api.overlapping_wrapper import OverlappingWrapper
from asyncddp.integrations.bagua.torch_api.reducer import Reducer

__all__ = [
    "BaguaModule", "BucketType", "Compressor", "DistributedAlgorithm", "DistributedModule",
    "ModelSwitchWrapper", "OverlappingWrapper", "ReduceOp", "Reducer", "allreduce_parameters",
    "bagua_init", "broadcast_parameters",
]  # fmt: skip
