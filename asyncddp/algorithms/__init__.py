"""Methods: what is averaged, when, among whom. One method, one file, one line below."""

from __future__ import annotations

from asyncddp.algorithms.contract import Algorithm, How, What, When
from asyncddp.algorithms.needs import Needs
from asyncddp.registry import Registry

__all__ = ["ALGORITHMS", "Algorithm", "How", "Needs", "What", "When"]

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "adapt_then_combine": "asyncddp.algorithms.adapt_then_combine:AdaptThenCombine",
        "adapt_with_combine": "asyncddp.algorithms.adapt_with_combine:AdaptWithCombine",
        "async_model_average": "asyncddp.algorithms.async_model_average:AsyncModelAverage",
        "gradient_allreduce": "asyncddp.algorithms.gradient_allreduce:GradientAllreduce",
        "pull_get": "asyncddp.algorithms.pull_get:PullGet",
        "push_sum": "asyncddp.algorithms.push_sum:PushSum",
        "win_put": "asyncddp.algorithms.win_put:WinPut",
    },
    group="asyncddp.algorithms",
)
