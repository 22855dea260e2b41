"""Digits shared out by Dirichlet(α): accuracy by method and heterogeneity, and by graph.

As in the papers whose orders are judged, what counts is the accuracy of the ranks' own models, on
average, and each step size is the best of a grid on other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from asyncddp import topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.methods.contender import Contender
from benchmarks.methods.few_labels import labels_grid
from benchmarks.methods.grid import Grid, Values
from benchmarks.methods.tuned_digits import (
    AXIS,
    METHODS,
    Place,
    Trial,
    TunedTraining,
    ahead,
    measured,
    percent,
    told_rates,
)

__all__ = ["grids", "kept_distance"]

Advance = Callable[[str], None]

_BETTER = (
    ("gradient tracking", "D-SGD"),
    ("QG-DSGDm", "D-SGD with momentum"),
    ("DecentLaM", "D-SGD with momentum"),
    ("momentum tracking", "D-SGD with momentum"),
)
"""Who is published to be ahead of whom where data differ most."""
_PUBLISHED_GRAPHS = {
    "ring": "85.0 ± 1.0",
    "one-peer exponential": "88.2 ± 0.3",
    "base-2": "88.5 ± 0.1",
}
"""CIFAR-10, VGG-11, 15 ranks, Dirichlet(0.1), QG-DSGDm: github.com/yukiTakezawa/BaseGraph."""
_ON_GRAPHS = ("D-SGD with momentum", "QG-DSGDm")
_SETTLED = 400  # periods


@dataclass(frozen=True)
class _Size:
    """How much is trained.

    Attributes:
        ring: Ranks of the ring on which methods are compared.
        ranks: Ranks of the graphs that are compared.
        alphas: How the ranks' digits differ, by Dirichlet(α).
        training: Of each method.
    """

    ring: int = 16
    ranks: int = 25
    alphas: tuple[float, ...] = (0.1, 1.0, 10.0)
    training: TunedTraining = field(default_factory=TunedTraining)


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


def _by_alpha(methods: Sequence[Contender], size: _Size, advance: Advance) -> list[Grid]:
    graph = topology.ring(size.ring)
    trials = {
        (one.title, f"Dirichlet({alpha:g})"): Trial(one, graph, {"alpha": alpha}, size.training)
        for one in methods
        for alpha in size.alphas
    }
    values, rates = measured(trials, advance)
    rows, columns = [one.title for one in methods], [f"Dirichlet({one:g})" for one in size.alphas]
    note = size.training.note(f"Ring of {size.ring} ranks") + f": {told_rates(rates, rows)}."
    first, last = columns[0], columns[-1]
    several = len(size.training.seeds) > 1
    found = [
        Grid(
            "digits_own", "digits: the ranks' own models", rows, columns, values, percent, AXIS,
            aims={
                better: ahead(f"> {worse}", values[better, first], values[worse, first])
                for better, worse in _BETTER
                if several
            },
            note=note, scale=100.0,
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
            better: ahead(f"less than {worse}", lost[worse], lost[better])
            for better, worse in _BETTER
        },
        note="Differences of the table above, seed by seed.", scale=100.0,
    )  # fmt: skip


def _by_graph(methods: Sequence[Contender], size: _Size, advance: Advance) -> Grid:
    n, least, last = size.ranks, min(size.alphas), methods[-1]
    graphs: dict[str, GraphOrSchedule] = {
        "ring": topology.ring(n),
        "one-peer exponential": topology.one_peer_exponential(n),
        "base-2": topology.base_k(n, 1),
        "base-5": topology.base_k(n, 4),
    }
    settings = {one.title: (one, least) for one in methods} | {
        f"{last.title}, Dirichlet({alpha:g})": (last, alpha)
        for alpha in size.alphas
        if alpha != least
    }
    trials = {
        (name, column): Trial(one, graph, {"alpha": alpha}, size.training)
        for name, graph in graphs.items()
        for column, (one, alpha) in settings.items()
    }
    values, rates = measured(trials, advance)
    both = {
        name: tuple(map(fmean, zip(*(values[name, one.title] for one in methods), strict=True)))
        for name in graphs
    }
    distances = (f"{name} {kept_distance(graph):.2f}" for name, graph in graphs.items())
    trained = size.training.note(f"{n} ranks, Dirichlet({least:g}) but where another is named")
    note = (
        f"{trained}: {told_rates(rates, [*graphs])}. Aims are of the mean of both methods. Mean "
        "square distance from their average that ranks keep where each step moves each by 1 at "
        f"random: {', '.join(distances)}."
    )
    return Grid(
        "digits_graphs", f"digits: own models, Dirichlet({least:g}), by graph", list(graphs),
        list(settings), values, percent, AXIS, row_name="graph", scale=100.0,
        aims={
            "one-peer exponential": ahead("> ring", both["one-peer exponential"], both["ring"]),
            "base-2": ahead("> one-peer", both["base-2"], both["one-peer exponential"]),
            "base-5": ahead("> base-2", both["base-5"], both["base-2"]),
        },
        beside={name: _PUBLISHED_GRAPHS.get(name, "") for name in graphs},
        beside_name="published, CIFAR-10", note=note,
    )  # fmt: skip


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Compare by the heterogeneity of the data, by graph, and with few labels on each rank."""
    if quick:
        size = _Size(4, 4, (0.1,), TunedTraining(20, (0,), (100,), (3.0,)))
        return _by_alpha(METHODS[1:4], size, advance)
    size = _Size()
    chosen = [one for one in METHODS if one.title in _ON_GRAPHS]
    return [
        *_by_alpha(METHODS, size, advance),
        labels_grid(advance),
        _by_graph(chosen, size, advance),
    ]
