"""Digits shared out by Dirichlet(α): accuracy by method, and by graph, with three seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import topology
from asyncddp import simulate
from benchmarks.methods.contender import Contender
from benchmarks.methods.grid import Grid, Values
from topology import GraphOrSchedule

__all__ = ["grids", "mean_accuracy"]

_BETA = 0.9
_SGD = (
    Contender("D-SGD", "adapt_then_combine"),
    Contender("gradient tracking", "gradient_tracking"),
)
_MOMENTUM = (
    Contender("D-SGD with momentum", "adapt_then_combine", momentum=_BETA),
    Contender("QG-DSGDm", "quasi_global_momentum", {"beta": _BETA}),
    Contender("momentum tracking", "momentum_tracking", {"beta": _BETA}),
    Contender("allreduce, momentum", "gradient_allreduce", momentum=_BETA),
)
_ALPHAS, _SEEDS = (0.1, 1.0, 10.0), (0, 1, 2)
_TUNED_ON = 10  # another seed than those that are shown
_RATES = (0.1, 0.3, 1.0)  # over 1 - beta
_QUICK_RATE = _RATES[1]


@dataclass(frozen=True)
class _Size:
    """How much is trained."""

    ranks: int = 25
    steps: int = 150
    alphas: tuple[float, ...] = _ALPHAS
    seeds: tuple[int, ...] = _SEEDS


def mean_accuracy(problem: simulate.Problem, run: simulate.Run) -> float:
    """Return the accuracy of the ranks' own models, on average."""
    assert problem.evaluate is not None
    assert isinstance(problem.model, torch.nn.Module)
    model, found = copy.deepcopy(problem.model), []
    for rank in range(problem.ranks):
        model.load_state_dict({name: rows[rank] for name, rows in run.parameters.items()})
        found.append(problem.evaluate(model))
    return sum(found) / len(found)


@dataclass(frozen=True)
class _Trial:
    """Training of one method by one step size on one graph."""

    one: Contender
    rate: float
    graph: GraphOrSchedule

    def accuracies(self, size: _Size, alpha: float, seed: int) -> tuple[float, float]:
        """Return the accuracy of the average model, and of the ranks' own."""
        problem = simulate.digits(size.ranks, alpha=alpha, seed=seed)
        lr = self.rate * (1 - _BETA if self.one in _MOMENTUM else 1)
        run = self.one.train(problem, lr, self.graph, steps=size.steps, seed=seed)
        assert run is not None, f"{self.one.title} is refused"
        return float(run.score[-1]), mean_accuracy(problem, run)


def _tuned(
    one: Contender, graph: GraphOrSchedule, size: _Size, advance: Callable[[str], None]
) -> float:
    """Return the step size by which the ranks' own models do best, on another seed."""
    found = {}
    for rate in _RATES:
        advance(f"digits: step size of {one.title}")
        trial = _Trial(one, rate, graph)
        found[rate] = trial.accuracies(size, min(size.alphas), _TUNED_ON)[1]
    return max(found, key=lambda rate: found[rate])


def _column(alpha: float) -> str:
    return f"Dirichlet({alpha:g})"


def percent(values: Values) -> str:
    """Tell an accuracy, and half of what lies between the seeds."""
    mean = f"{100 * sum(values) / len(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {50 * (max(values) - min(values)):.1f}"


def _by_alpha(
    rates: Mapping[Contender, float], size: _Size, advance: Callable[[str], None]
) -> list[Grid]:
    average: dict[tuple[str, str], Values] = {}
    own: dict[tuple[str, str], Values] = {}
    graph = topology.base_k(size.ranks, 1)
    for one, rate in rates.items():
        for alpha in size.alphas:
            advance(f"digits, Dirichlet({alpha:g}): {one.title}")
            found = [_Trial(one, rate, graph).accuracies(size, alpha, seed) for seed in size.seeds]
            place = one.title, _column(alpha)
            average[place], own[place] = zip(*found, strict=True)
    rows, columns = [one.title for one in rates], [_column(alpha) for alpha in size.alphas]
    note = (
        f"{size.ranks} ranks, base-2 schedule, {size.steps} steps of 16 images; "
        "mean of the seeds ± half of what lies between them. Step sizes over 1 - beta, the "
        f"best of {', '.join(map(str, _RATES))} at {columns[0]} with another seed: "
        + ", ".join(f"{one.title} {rate:g}" for one, rate in rates.items())
    )
    kinds = (("own", "the ranks' own models", own), ("average", "the average model", average))
    return [
        Grid(
            f"digits_{key}",
            f"digits: {title}",
            rows,
            columns,
            values,
            percent,
            "accuracy on images set aside, %",
            aims=_order(values, columns[0]) if len(size.seeds) > 1 else {},
            note=note,
            scale=100.0,
        )
        for key, title, values in kinds
    ]


def _order(values: Mapping[tuple[str, str], Values], column: str) -> dict[str, tuple[str, bool]]:
    """Judge who is published to be ahead of whom where data differ most."""
    pairs = (
        ("QG-DSGDm", "D-SGD with momentum"),
        ("momentum tracking", "D-SGD with momentum"),
        ("gradient tracking", "D-SGD"),
    )
    return {
        better: (f"> {worse}", sum(values[better, column]) > sum(values[worse, column]))
        for better, worse in pairs
        if (better, column) in values and (worse, column) in values
    }


def _by_graph(
    rates: Mapping[Contender, float], size: _Size, advance: Callable[[str], None]
) -> Grid:
    n, alpha = size.ranks, min(size.alphas)
    graphs: dict[str, GraphOrSchedule] = {
        "ring": topology.ring(n),
        "one-peer exponential": topology.one_peer_exponential(n),
        "base-2": topology.base_k(n, 1),
        "base-5": topology.base_k(n, 4),
    }
    chosen = [one for one in rates if one.title in ("D-SGD with momentum", "QG-DSGDm")]
    values: dict[tuple[str, str], Values] = {}
    for name, graph in graphs.items():
        for one in chosen:
            advance(f"digits, {name}: {one.title}")
            trial = _Trial(one, rates[one], graph)
            found = [trial.accuracies(size, alpha, seed)[1] for seed in size.seeds]
            values[name, one.title] = tuple(found)
    columns = [one.title for one in chosen]
    ahead = all(
        sum(values["base-2", column]) > sum(values[other, column])
        for column in columns
        for other in ("ring", "one-peer exponential")
    )
    return Grid(
        "digits_graphs", f"digits: own models, {_column(alpha)}, by graph", list(graphs), columns,
        values, percent, "accuracy on images set aside, %", row_name="graph", scale=100.0,
        aims={"base-2": ("> ring, one-peer exponential", ahead)},
        note="The same training and step sizes on other graphs.",
    )  # fmt: skip


def grids(quick: bool, advance: Callable[[str], None]) -> list[Grid]:
    """Compare by the heterogeneity of the data, and by graph."""
    size = _Size(4, 20, (0.1,), (0,)) if quick else _Size()
    every = _SGD + _MOMENTUM
    if quick:
        return _by_alpha(dict.fromkeys(every[1:4], _QUICK_RATE), size, advance)
    graph = topology.base_k(size.ranks, 1)
    rates = {one: _tuned(one, graph, size, advance) for one in every}
    return [*_by_alpha(rates, size, advance), _by_graph(rates, size, advance)]
