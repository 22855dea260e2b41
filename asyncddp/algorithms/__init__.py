"""Training algorithms: which tensors are averaged, when in a step, and with which ranks."""

from __future__ import annotations

from asyncddp.algorithms.algorithm import (
    Algorithm,
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.registry import PluginRegistry

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AveragedQuantity",
    "CommunicationPattern",
    "CommunicationTiming",
    "CompressionUse",
    "TopologyRequirements",
]

_METHODS = "asyncddp.algorithms.methods"

ALGORITHMS: PluginRegistry[type[Algorithm]] = PluginRegistry(
    "algorithm",
    {
        "adapt_then_combine": f"{_METHODS}.adapt_then_combine:AdaptThenCombine",
        "adapt_with_combine": f"{_METHODS}.adapt_with_combine:AdaptWithCombine",
        "async_model_average": f"{_METHODS}.async_model_average:AsyncModelAverage",
        "bytegrad": f"{_METHODS}.bytegrad:ByteGrad",
        "choco_sgd": f"{_METHODS}.choco_sgd:ChocoSGD",
        "decentralized": f"{_METHODS}.decentralized:Decentralized",
        "gradient_allreduce": f"{_METHODS}.gradient_allreduce:GradientAllreduce",
        "low_precision_decentralized": (
            f"{_METHODS}.low_precision_decentralized:LowPrecisionDecentralized"
        ),
        "pull_get": f"{_METHODS}.pull_get:PullGet",
        "push_sum": f"{_METHODS}.push_sum:PushSum",
        "qadam": f"{_METHODS}.qadam:QAdam",
        "win_put": f"{_METHODS}.win_put:WinPut",
    },
    group="asyncddp.algorithms",
)
