"""Training algorithms: which tensors are averaged, when in a step, and with which ranks."""

from __future__ import annotations

from asyncddp.algorithms.algorithm import (
    Algorithm,
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
)
from asyncddp.algorithms.topology_requirements import TopologyRequirements
from asyncddp.registry import PluginRegistry

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AveragedQuantity",
    "CommunicationPattern",
    "CommunicationTiming",
    "TopologyRequirements",
]

ALGORITHMS: PluginRegistry[type[Algorithm]] = PluginRegistry(
    "algorithm",
    {
        "adapt_then_combine": "asyncddp.algorithms.methods.adapt_then_combine:AdaptThenCombine",
        "adapt_with_combine": "asyncddp.algorithms.methods.adapt_with_combine:AdaptWithCombine",
        "async_model_average": "asyncddp.algorithms.methods.async_model_average:AsyncModelAverage",
        "gradient_allreduce": "asyncddp.algorithms.methods.gradient_allreduce:GradientAllreduce",
        "pull_get": "asyncddp.algorithms.methods.pull_get:PullGet",
        "push_sum": "asyncddp.algorithms.methods.push_sum:PushSum",
        "win_put": "asyncddp.algorithms.methods.win_put:WinPut",
    },
    group="asyncddp.algorithms",
)
