"""Bagua's algorithms, and the base classes of algorithms that users write."""

from asyncddp.integrations.bagua.torch_api.algorithms import (
    async_model_average,
    base,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from asyncddp.integrations.bagua.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
)

__all__ = [
    "Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry", "async_model_average", "base",
    "bytegrad", "decentralized", "gradient_allreduce", "q_adam",
]  # fmt: skip

for _name, _kind in {
    "async": async_model_average.AsyncModelAverageAlgorithm,
    "bytegrad": bytegrad.ByteGradAlgorithm,
    "decentralized": decentralized.DecentralizedAlgorithm,
    "gradient_allreduce": gradient_allreduce.GradientAllReduceAlgorithm,
    "low_precision_decentralized": decentralized.LowPrecisionDecentralizedAlgorithm,
    "qadam": q_adam.QAdamAlgorithm,
}.items():
    GlobalAlgorithmRegistry.register(_name, _kind, _kind.__doc__ or "")
