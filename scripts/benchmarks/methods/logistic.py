"""Logistic regression with other data on every rank, whose optimum Newton's method finds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncddp import simulate
from asyncddp.algorithms import ALGORITHMS
from benchmarks.methods.contender import Contender, every_method
from benchmarks.methods.grid import Grid
from benchmarks.methods.least_squares import errors_on_graphs, graphs
from benchmarks.ranks import Advance

_RANKS, _ROWS, _DIMENSIONS = 8, 100, 10
_LR, _STEPS, _SETTLED, _SEEDS = 0.8, 500, 200, 3
_GRAPHS = ("ring", "one-peer exponential")
_QUICK = ("adapt_then_combine", "gradient_tracking")
_NOTE = (
    f"{_RANKS} ranks, {_ROWS} samples of each in float64, {_STEPS} steps from 0 ({_SETTLED} where "
    f"there is a bias) of {_LR}, or {_LR / 10:g} with momentum; mean of the seeds ± half of what "
    "lies between them."
)
Array = npt.NDArray[np.float64]


def logistic_regression(ranks: int, seed: int) -> simulate.Problem:
    r"""Make a logistic regression whose ranks' labels come from different models.

    .. math:: f_i(x) = \frac1m \sum_k \log(1 + e^{-y_{ik} a_{ik}^T x}), \qquad
              P(y_{ik} = 1) = \frac{1}{1 + e^{-a_{ik}^T (x_s + \xi_i)}}

    with :math:`a_{ik}`, :math:`x_s` and :math:`2 \xi_i` of the standard normal distribution.
    """
    random = np.random.default_rng(seed)
    center = random.standard_normal(_DIMENSIONS)
    own = center + random.standard_normal((ranks, _DIMENSIONS)) / 2
    rows = random.standard_normal((ranks, _ROWS, _DIMENSIONS))
    chances = 1 / (1 + np.exp(-np.einsum("nij,nj->ni", rows, own)))
    labels = (random.random(chances.shape) < chances).astype(np.float64)
    model = torch.nn.Linear(_DIMENSIONS, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimum = newton(rows.reshape(-1, _DIMENSIONS), labels.reshape(-1))
    data = [(torch.tensor(a), torch.tensor(y)) for a, y in zip(rows, labels, strict=True)]
    return simulate.Problem(
        model,
        _loss,
        data,
        optimum=torch.tensor(optimum),
        name=f"logistic regression, {ranks} ranks",
    )


def _loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(output[:, 0], labels)


def newton(rows: Array, labels: Array) -> Array:
    """Minimise the mean logistic loss until the gradient is rounding."""
    x = np.zeros(rows.shape[1])
    for _ in range(50):
        chances = 1 / (1 + np.exp(-rows @ x))
        gradient = rows.T @ (chances - labels) / len(rows)
        if np.linalg.norm(gradient) < 1e-15:
            break
        curvature = (rows.T * (chances * (1 - chances))) @ rows / len(rows)
        x -= np.linalg.solve(curvature, gradient)
    return x


def _rate(one: Contender) -> float:
    return _LR / 10 if one.momentum or ALGORITHMS[one.name].owns_momentum else _LR


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Compare the methods on two graphs."""
    every = [one for one in every_method() if not quick or one.title in _QUICK]
    seeds = range(1 if quick else _SEEDS)
    problems = [logistic_regression(_RANKS, seed) for seed in seeds]
    chosen = {name: graph for name, graph in graphs(_RANKS).items() if name in _GRAPHS}
    steps = (_STEPS, _SETTLED)
    return [errors_on_graphs("logistic", problems, every, chosen, _rate, steps, advance, _NOTE)]
