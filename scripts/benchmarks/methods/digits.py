"""Digits shared out by Dirichlet(α): accuracy by method and heterogeneity, and by graph.

As in the papers whose orders are judged, what counts is the accuracy of the ranks' own models, on
average, and each step size is the best of a grid on other seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from asyncddp import topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.methods.contender import Contender
from benchmarks.methods.grid import Grid
from benchmarks.methods.tuned_digits import METHODS, Trial, TunedTraining, ahead, tuned_grid
from benchmarks.ranks import Advance

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


_LABEL_RANKS = 10
_STAYING = TunedTraining(
    tuned_on=tuple(range(100, 104)), factors=(0.3, 1.0, 3.0, 10.0), falling=False
)
_SETTINGS: Mapping[str, tuple[Mapping[str, Any], TunedTraining]] = {
    "1 label a rank": ({"labels_per_rank": 1}, _STAYING),
    "2 labels a rank": ({"labels_per_rank": 2}, _STAYING),
    "1 label, step size to 0": ({"labels_per_rank": 1}, replace(_STAYING, falling=True)),
}
_BETTER_LABELS = (
    ("gradient tracking", "D-SGD"),
    ("QG-DSGDm", "D-SGD with momentum"),
    ("DecentLaM", "QG-DSGDm"),
    ("momentum tracking", "DecentLaM"),
)
"""Who is published to be ahead of whom."""
_PUBLISHED_LABELS = {
    "D-SGD with momentum": "35.6",
    "QG-DSGDm": "49.4",
    "DecentLaM": "54.9",
    "momentum tracking": "66.8",
}
"""CIFAR-10, LeNet, ring of 8 ranks of 4 labels each: github.com/yukiTakezawa/MomentumTracking."""


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
    graph, ring = topology.ring(size.ring), f"Ring of {size.ring} ranks"
    trials = {
        (one.title, f"Dirichlet({alpha:g})"): Trial(one, graph, {"alpha": alpha}, size.training)
        for one in methods
        for alpha in size.alphas
    }
    better = _BETTER if len(size.training.seeds) > 1 else ()
    title = "digits: the ranks' own models"
    own = tuned_grid("digits_own", title, trials, advance, ring, better)
    return [own, _lost(own)] if len(own.columns) > 1 else [own]


def _lost(own: Grid) -> Grid:
    """Compare how much accuracy the most different data cost, beside the most alike ones."""
    first, last = own.columns[0], own.columns[-1]
    column = f"from {last} to {first}"
    lost = {
        row: tuple(
            a - b for a, b in zip(own.values[row, last], own.values[row, first], strict=True)
        )
        for row in own.rows
    }
    return replace(
        own,
        key="digits_lost",
        title="digits: accuracy lost where data differ",
        columns=[column],
        values={(row, column): one for row, one in lost.items()},
        axis="accuracy lost, %",
        aims={one: ahead(f"less than {other}", lost[other], lost[one]) for one, other in _BETTER},
        note="Differences of the table above, seed by seed.",
    )


def _by_labels(advance: Advance) -> Grid:
    """Compare methods on a ring whose ranks have one label of ten each, or two."""
    trials = {
        (one.title, column): Trial(one, topology.ring(_LABEL_RANKS), data, training)
        for column, (data, training) in _SETTINGS.items()
        for one in METHODS
    }
    return tuned_grid(
        "digits_labels",
        "digits: own models, few labels on each rank",
        trials,
        advance,
        f"Ring of {_LABEL_RANKS} ranks",
        _BETTER_LABELS,
        beside={one.title: _PUBLISHED_LABELS.get(one.title, "") for one in METHODS},
        beside_name="published, CIFAR-10",
    )


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
    grid = tuned_grid(
        "digits_graphs",
        f"digits: own models, Dirichlet({least:g}), by graph",
        trials,
        advance,
        f"{n} ranks, Dirichlet({least:g}) but where another is named",
        row_name="graph",
        beside={name: _PUBLISHED_GRAPHS.get(name, "") for name in graphs},
        beside_name="published, CIFAR-10",
    )
    both = {
        name: tuple(
            map(fmean, zip(*(grid.values[name, one.title] for one in methods), strict=True))
        )
        for name in graphs
    }
    ladder = {"one-peer exponential": "ring", "base-2": "one-peer exponential", "base-5": "base-2"}
    aims = {
        one: ahead(f"> {other.removesuffix(' exponential')}", both[one], both[other])
        for one, other in ladder.items()
    }
    distances = (f"{name} {kept_distance(graph):.2f}" for name, graph in graphs.items())
    note = (
        f"{grid.note} Aims are of the mean of both methods. Mean square distance from their "
        "average that ranks keep where each step moves each by 1 at random: "
        f"{', '.join(distances)}."
    )
    return replace(grid, aims=aims, note=note)


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Compare by the heterogeneity of the data, by graph, and with few labels on each rank."""
    if quick:
        size = _Size(4, 4, (0.1,), TunedTraining(20, (0,), (100,), (3.0,)))
        return _by_alpha(METHODS[1:4], size, advance)
    size = _Size()
    chosen = [one for one in METHODS if one.title in _ON_GRAPHS]
    return [
        *_by_alpha(METHODS, size, advance),
        _by_labels(advance),
        _by_graph(chosen, size, advance),
    ]
