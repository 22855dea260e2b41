"""Random quadratics of RelaySGD's appendix: steps to an accuracy, beside those published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncddp import simulate, topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.methods.contender import Contender
from benchmarks.methods.grid import Grid, Values
from benchmarks.ranks import Advance

_RANKS, _DIMENSIONS = 32, 10
_LEAST = 0.5  # singular value of a rank's matrix; the largest is 1
_ENOUGH = 1e-6  # of f(mean of models) - f(optimum)
_SEEDS = (0, 1, 2)
_NEVER = float("inf")
_MOST = 2400  # steps
_HOPELESS = 500  # steps where the paper has more than that
_NOTE = (
    "Whole batches in float64; mean of the seeds ± half of what lies between them. 'published': "
    "steps in the notebook of the paper's figure 7, of other random numbers, for ζ² = 0 / 0.1 / "
    "10. Step sizes are about the best, as they are there. 'not reached': not in twice the "
    f"published steps and 50, {_MOST:,} at most, or in {_HOPELESS} where the paper has more."
)


def random_quadratics(ranks: int, heterogeneity: float, seed: int) -> simulate.Problem:
    r"""Make quadratics whose ranks' gradients differ at the optimum by as much as is said.

    .. math:: f(x) = \frac1n \sum_i \lVert A_i x - b_i \rVert^2, \qquad
              \frac1n \sum_i \lVert A_i^T (A_i x^* - b_i) \rVert^2 = \zeta^2, \quad
              \lVert x^* \rVert = 1

    with singular values of :math:`A_i` from 0.5 to 1, and gradients :math:`A_i^T (A_i x - b_i)`.
    The score is :math:`f(\bar x) - f(x^*)`.

    Args:
        ranks: Number of ranks, n.
        heterogeneity: :math:`\zeta^2`.
        seed: Of the numbers.
    """
    random = np.random.default_rng(seed)
    left, _, right = np.linalg.svd(random.standard_normal((ranks, _DIMENSIONS, _DIMENSIONS)))
    a = left * np.linspace(_LEAST, 1, _DIMENSIONS) @ right
    b = np.einsum("nij,nj->ni", a, random.standard_normal((ranks, _DIMENSIONS)))
    normal = np.einsum("nij,nik->jk", a, a)
    b -= a @ np.linalg.solve(normal, np.einsum("nij,ni->j", a, b))
    slopes = np.einsum("nij,ni->nj", a, b)
    b *= np.sqrt(heterogeneity / np.square(slopes).sum(axis=1).mean())
    optimum = random.standard_normal(_DIMENSIONS)
    optimum /= np.linalg.norm(optimum)
    b += a @ optimum
    model = torch.nn.Linear(_DIMENSIONS, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    target = torch.tensor(optimum)

    def suboptimality(average: torch.nn.Module) -> float:
        away = average.get_parameter("weight")[0] - target
        return float(away @ torch.tensor(normal) @ away / ranks)

    return simulate.Problem(
        model,
        lambda output, targets: (output[:, 0] - targets).square().sum() / 2,
        [(torch.tensor(rows), torch.tensor(own)) for rows, own in zip(a, b, strict=True)],
        optimum=target,
        evaluate=suboptimality,
        name=f"random quadratics, {ranks} ranks",
    )


def _chain(ranks: int) -> GraphOrSchedule:
    return topology.metropolis_weights(topology.grid_2d(ranks, (1, ranks)))


def _ring(ranks: int) -> GraphOrSchedule:
    """Return the ring of the paper for exact methods: each neighbour has weight 1/3 - 0.01."""
    near = 1 / 3 - 0.01
    matrix = np.eye(ranks) * (1 - 2 * near)
    for rank in range(ranks):
        matrix[rank, (rank + 1) % ranks] = matrix[rank, (rank - 1) % ranks] = near
    return topology.from_adjacency(matrix)


@dataclass(frozen=True)
class _Entry:
    """A method on a graph, with step sizes by ζ², and what the paper's notebook counts."""

    method: Contender
    place: str
    graph: Callable[[int], GraphOrSchedule]
    rates: tuple[float, float, float]
    published: tuple[int, int, int] | None = None

    @property
    def title(self) -> str:
        """Name in tables."""
        return f"{self.method.title}, {self.place}"


_RELAY = Contender("RelaySGD", "relay_sgd")
_TRACKING = Contender("gradient tracking", "gradient_tracking")
_DSGD = Contender("D-SGD", "adapt_then_combine")
_D2 = Contender("D²", "d2")
_HETEROGENEITY = (0.0, 0.1, 10.0)
_ENTRIES = (
    _Entry(_RELAY, "chain", _chain, (1.74, 1.74, 1.74), (51, 51, 54)),
    _Entry(_RELAY, "binary tree", topology.tree, (1.74, 1.74, 1.74)),
    _Entry(_D2, "ring", _ring, (0.79, 0.39, 0.31), (18, 34, 54)),
    _Entry(_TRACKING, "ring", _ring, (0.87, 0.0387, 0.0191), (10, 301, 641)),
    _Entry(_TRACKING, "chain", _chain, (0.87, 0.0387, 0.0191)),
    _Entry(_DSGD, "ring", topology.ring, (1.25, 0.0104, 0.000763), (13, 1469, 19818)),
)


def _steps(run: simulate.Run | None) -> float:
    """Return after how many steps the mean stays at the optimum; infinity for never."""
    assert run is not None
    away = np.flatnonzero(~(run.score <= _ENOUGH))
    first = int(away[-1]) + 1 if len(away) else 0
    return float(run.steps[first]) if first < len(run.steps) else _NEVER


def _text(values: Values) -> str:
    if _NEVER in values:
        return "not reached"
    mean, spread = sum(values) / len(values), (max(values) - min(values)) / 2
    return f"{mean:.0f}" if len(values) == 1 else f"{mean:.0f} ± {spread:.0f}"


def _limit(entry: _Entry, place: int) -> int:
    """Return how many steps are made: some more than the method takes in the paper."""
    same = [one for one in _ENTRIES if one.method is entry.method and one.published]
    published = same[0].published
    assert published is not None
    return min(_MOST, 2 * published[place] + 50) if published[place] < _MOST else _HOPELESS


def _counted(
    entries: Sequence[_Entry], ranks: int, seeds: Sequence[int], advance: Advance
) -> dict[tuple[str, str], Values]:
    """Count the steps of each method by ζ²."""
    found: dict[tuple[str, str], Values] = {}
    for entry in entries:
        for place, heterogeneity in enumerate(_HETEROGENEITY):
            advance(f"quadratics: {entry.title}, ζ² = {heterogeneity:g}")
            limit, counts = _limit(entry, place), []
            for seed in seeds:
                problem = random_quadratics(ranks, heterogeneity, seed)
                graph, rate = entry.graph(ranks), entry.rates[place]
                every = max(1, limit // 200)
                run = entry.method.train(problem, rate, graph, steps=limit, record_every=every)
                counts.append(_steps(run))
            found[entry.title, f"ζ² = {heterogeneity:g}"] = tuple(counts)
    return found


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Count the steps that methods need on chain, ring and tree."""
    entries = [one for one in _ENTRIES if not quick or one.method in (_RELAY, _D2)]
    ranks, seeds = (8, _SEEDS[:1]) if quick else (_RANKS, _SEEDS)
    values = _counted(entries, ranks, seeds, advance)
    columns = [f"ζ² = {one:g}" for one in _HETEROGENEITY]
    return [
        Grid(
            "quadratics",
            f"random quadratics, {ranks} ranks",
            [one.title for one in entries],
            columns,
            values,
            _text,
            f"steps until f(mean of models) - f(optimum) stays below {_ENOUGH:g}",
            log=True,
            aims={
                one.title: (
                    "at most twice the published",
                    all(
                        max(values[one.title, column]) <= 2 * steps
                        for column, steps in zip(columns, one.published, strict=True)
                        if 2 * steps <= _MOST
                    ),
                )
                for one in entries
                if one.published and not quick
            },
            beside={
                one.title: " / ".join(f"{count:,}" for count in one.published)
                for one in entries
                if one.published
            },
            beside_name="published, 32 ranks",
            note=_NOTE,
        )
    ]
