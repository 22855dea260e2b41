"""Digits shared out by Dirichlet(α): accuracy by method and heterogeneity, and by graph.

As in the papers whose orders are judged, what counts is the accuracy of the ranks' own models, on
average, and each step size is the best of a grid on other seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
import torch

import topology
from asyncddp import simulate
from benchmarks.methods.contender import Contender
from benchmarks.methods.grid import Grid, Values
from benchmarks.methods.paired import PairedDifference
from topology import GraphOrSchedule

__all__ = ["grids", "mean_accuracy"]

Advance = Callable[[str], None]
Place = tuple[str, str]  # row and column

_BETA = 0.9
_MOMENTUM = {"beta": _BETA}
_METHODS = (
    Contender("D-SGD", "adapt_then_combine"),
    Contender("gradient tracking", "gradient_tracking"),
    Contender("D-SGD with momentum", "adapt_then_combine", momentum=_BETA),
    Contender("QG-DSGDm", "quasi_global_momentum", _MOMENTUM),
    Contender("DecentLaM", "decentlam", _MOMENTUM),
    Contender("momentum tracking", "momentum_tracking", _MOMENTUM),
    Contender("allreduce, momentum", "gradient_allreduce", momentum=_BETA),
)
_BETTER = (
    ("gradient tracking", "D-SGD"),
    ("QG-DSGDm", "D-SGD with momentum"),
    ("DecentLaM", "D-SGD with momentum"),
    ("momentum tracking", "D-SGD with momentum"),
)
"""Who is published to be ahead of whom where data differ most."""
_PUBLISHED = {
    "D-SGD with momentum": "35.6",
    "QG-DSGDm": "49.4",
    "DecentLaM": "54.9",
    "momentum tracking": "66.8",
}
"""CIFAR-10, LeNet, ring of 8 ranks of 4 labels each: github.com/yukiTakezawa/MomentumTracking."""
_PUBLISHED_GRAPHS = {
    "ring": "85.0 ± 1.0",
    "one-peer exponential": "88.2 ± 0.3",
    "base-2": "88.5 ± 0.1",
}
"""CIFAR-10, VGG-11, 15 ranks, Dirichlet(0.1), QG-DSGDm: github.com/yukiTakezawa/BaseGraph."""
_ON_GRAPHS = ("D-SGD with momentum", "QG-DSGDm")
_TUNED_ON = (100, 101)  # other seeds than those that are shown
_SETTLED = 400  # periods
_AXIS = "accuracy on images set aside, %"


@dataclass(frozen=True)
class _Size:
    """How much is trained."""

    ring: int = 16
    ranks: int = 25
    steps: int = 150
    alphas: tuple[float, ...] = (0.1, 1.0, 10.0)
    seeds: tuple[int, ...] = tuple(range(10))
    tuned_on: tuple[int, ...] = _TUNED_ON
    factors: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)


def mean_accuracy(problem: simulate.Problem, run: simulate.Run) -> float:
    """Return the accuracy of the ranks' own models, on average."""
    assert problem.evaluate is not None
    assert isinstance(problem.model, torch.nn.Module)
    model, found = copy.deepcopy(problem.model), []
    for rank in range(problem.ranks):
        model.load_state_dict({name: rows[rank] for name, rows in run.parameters.items()})
        found.append(problem.evaluate(model))
    return sum(found) / len(found)


def kept_distance(graph: GraphOrSchedule) -> float:
    r"""Return how far ranks stay from their average where each step moves each at random.

    .. math:: C^{k+1} = W^{(k)} (C^k + I) W^{(k) T}, \qquad
              \frac1n \mathrm{tr}\big((I - J)\, C^k\big)

    on average over the rounds of a period, when it does not change any more: what D-SGD with
    independent noise of variance 1 has as mean square distance.
    """
    schedule = topology.as_schedule(graph)
    period, n = schedule.period or 1, schedule.n
    rounds = [topology.mixing_matrix(schedule, number) for number in range(period)]
    covariance, apart, found = np.zeros((n, n)), np.eye(n) - 1 / n, []
    for number in range(_SETTLED * period):
        mixing = rounds[number % period]
        covariance = mixing @ (covariance + np.eye(n)) @ mixing.T
        found.append(float(np.trace(apart @ covariance)) / n)
    return fmean(found[-period:])


@dataclass(frozen=True)
class _Trial:
    """Training of one method on one graph, with data of one heterogeneity."""

    one: Contender
    graph: GraphOrSchedule
    alpha: float
    size: _Size

    @property
    def _rates(self) -> Sequence[float]:
        """Step sizes to try, alike over 1 - β but for the methods without, which need less."""
        scale = 1 - _BETA if self.one.momentum or "beta" in self.one.settings else 0.1
        return [scale * factor for factor in self.size.factors]

    def _accuracy(self, rate: float, seed: int) -> float:
        """Return the accuracy of the ranks' own models, with a step size that ends at 0."""
        steps, ranks = self.size.steps, topology.as_schedule(self.graph).n
        problem = simulate.digits(ranks, alpha=self.alpha, seed=seed)
        cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
        run = self.one.train(problem, rate, self.graph, steps=steps, seed=seed, schedule=cosine)
        assert run is not None, f"{self.one.title} is refused"
        return mean_accuracy(problem, run)

    def accuracies(self) -> tuple[float, Values]:
        """Return the best step size on some seeds, and the accuracies with it on others."""
        by_rate = {
            rate: fmean(self._accuracy(rate, seed) for seed in self.size.tuned_on)
            for rate in self._rates
        }
        best = max(by_rate, key=lambda rate: by_rate[rate])
        return best, tuple(self._accuracy(best, seed) for seed in self.size.seeds)


def percent(values: Values) -> str:
    """Tell a share, and half of what lies between the seeds."""
    mean = f"{100 * fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {50 * (max(values) - min(values)):.1f}"


def _measured(
    trials: Mapping[Place, _Trial], advance: Advance
) -> tuple[dict[Place, Values], dict[Place, float]]:
    """Return accuracies and step sizes by place."""
    values: dict[Place, Values] = {}
    rates: dict[Place, float] = {}
    for place, trial in trials.items():
        advance(f"digits, {', '.join(place)}")
        rates[place], values[place] = trial.accuracies()
    return values, rates


def _ahead(words: str, one: Values, other: Values) -> tuple[str, bool | None]:
    """Judge whether one is ahead of the other by what differs on the same seeds."""
    difference = PairedDifference.of(one, other)
    told = f"{words}: {difference.told(100)}"
    if difference.positive is None:
        return f"{told}, less than twice its error", None
    return told, difference.positive


def _told_rates(rates: Mapping[Place, float], rows: Sequence[str]) -> str:
    by_row = {row: [rate for (name, _), rate in rates.items() if name == row] for row in rows}
    told = (f"{row} {' / '.join(f'{rate:g}' for rate in own)}" for row, own in by_row.items())
    return "; ".join(told)


def _note(size: _Size, where: str) -> str:
    seeds, grid = len(size.seeds), ", ".join(f"{factor:g}" for factor in size.factors)
    return (
        f"{where}; {size.steps} steps of 16 images, step size down to 0 along a cosine; mean of "
        f"{seeds} seeds ± half of what lies between them, and in aims the paired difference ± its "
        f"standard error. Step sizes are the best of 0.1 times {grid} on "
        f"{len(size.tuned_on)} other seeds"
    )


def _by_alpha(methods: Sequence[Contender], size: _Size, advance: Advance) -> list[Grid]:
    graph = topology.ring(size.ring)
    trials = {
        (one.title, f"Dirichlet({alpha:g})"): _Trial(one, graph, alpha, size)
        for one in methods
        for alpha in size.alphas
    }
    values, rates = _measured(trials, advance)
    rows, columns = [one.title for one in methods], [f"Dirichlet({one:g})" for one in size.alphas]
    note = _note(size, f"Ring of {size.ring} ranks") + f": {_told_rates(rates, rows)}."
    first, last = columns[0], columns[-1]
    several = len(size.seeds) > 1
    found = [
        Grid(
            "digits_own", "digits: the ranks' own models", rows, columns, values, percent, _AXIS,
            aims={
                better: _ahead(f"> {worse}", values[better, first], values[worse, first])
                for better, worse in _BETTER
                if several
            },
            beside={row: _PUBLISHED.get(row, "") for row in rows} if several else {},
            beside_name="published, CIFAR-10", note=note, scale=100.0,
        )
    ]  # fmt: skip
    if len(columns) > 1:
        found.append(_lost(rows, first, last, values))
    return found


def _lost(rows: Sequence[str], first: str, last: str, values: Mapping[Place, Values]) -> Grid:
    """Compare how much accuracy the most different data cost, beside the most alike ones."""
    column = f"from {last} to {first}"
    lost = {
        row: tuple(a - b for a, b in zip(values[row, last], values[row, first], strict=True))
        for row in rows
    }
    return Grid(
        "digits_lost", "digits: accuracy lost where data differ", rows, [column],
        {(row, column): one for row, one in lost.items()}, percent, "accuracy lost, %",
        aims={
            better: _ahead(f"less than {worse}", lost[worse], lost[better])
            for better, worse in _BETTER
        },
        note="Differences of the table above, seed by seed.", scale=100.0,
    )  # fmt: skip


def _by_graph(methods: Sequence[Contender], size: _Size, advance: Advance) -> Grid:
    n, alpha = size.ranks, min(size.alphas)
    graphs: dict[str, GraphOrSchedule] = {
        "ring": topology.ring(n),
        "one-peer exponential": topology.one_peer_exponential(n),
        "base-2": topology.base_k(n, 1),
        "base-5": topology.base_k(n, 4),
    }
    trials = {
        (name, one.title): _Trial(one, graph, alpha, size)
        for name, graph in graphs.items()
        for one in methods
    }
    values, rates = _measured(trials, advance)
    columns = [one.title for one in methods]
    both = {
        name: tuple(map(fmean, zip(*(values[name, one] for one in columns), strict=True)))
        for name in graphs
    }
    distances = (f"{name} {kept_distance(graph):.2f}" for name, graph in graphs.items())
    note = (
        f"{_note(size, f'{n} ranks, Dirichlet({alpha:g})')}: {_told_rates(rates, [*graphs])}. Aims "
        "are of the mean of both columns. Mean square distance from their average that ranks keep "
        f"where each step moves each by 1 at random: {', '.join(distances)}."
    )
    return Grid(
        "digits_graphs", f"digits: own models, Dirichlet({alpha:g}), by graph", list(graphs),
        columns, values, percent, _AXIS, row_name="graph", scale=100.0,
        aims={
            "one-peer exponential": _ahead("> ring", both["one-peer exponential"], both["ring"]),
            "base-2": _ahead("> one-peer", both["base-2"], both["one-peer exponential"]),
            "base-5": _ahead("> base-2", both["base-5"], both["base-2"]),
        },
        beside={name: _PUBLISHED_GRAPHS.get(name, "") for name in graphs},
        beside_name="published, CIFAR-10", note=note,
    )  # fmt: skip


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Compare by the heterogeneity of the data, and by graph."""
    if quick:
        size = _Size(4, 4, 20, (0.1,), (0,), (100,), (3.0,))
        return _by_alpha(_METHODS[1:4], size, advance)
    size = _Size()
    chosen = [one for one in _METHODS if one.title in _ON_GRAPHS]
    return [*_by_alpha(_METHODS, size, advance), _by_graph(chosen, size, advance)]
