"""Digits of which each rank has few labels: accuracy by method, in the published order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from asyncddp import topology
from benchmarks.methods.grid import Grid
from benchmarks.methods.tuned_digits import (
    AXIS,
    METHODS,
    Trial,
    TunedTraining,
    ahead,
    measured,
    percent,
    told_rates,
)

__all__ = ["labels_grid"]

_RANKS = 10
_STAYING = TunedTraining(
    tuned_on=tuple(range(100, 104)), factors=(0.3, 1.0, 3.0, 10.0), falling=False
)
_SETTINGS: Mapping[str, tuple[Mapping[str, Any], TunedTraining]] = {
    "1 label a rank": ({"labels_per_rank": 1}, _STAYING),
    "2 labels a rank": ({"labels_per_rank": 2}, _STAYING),
    "1 label, step size to 0": ({"labels_per_rank": 1}, replace(_STAYING, falling=True)),
}
_BETTER = (
    ("gradient tracking", "D-SGD"),
    ("QG-DSGDm", "D-SGD with momentum"),
    ("DecentLaM", "QG-DSGDm"),
    ("momentum tracking", "DecentLaM"),
)
"""Who is published to be ahead of whom."""
_PUBLISHED = {
    "D-SGD with momentum": "35.6",
    "QG-DSGDm": "49.4",
    "DecentLaM": "54.9",
    "momentum tracking": "66.8",
}
"""CIFAR-10, LeNet, ring of 8 ranks of 4 labels each: github.com/yukiTakezawa/MomentumTracking."""


def labels_grid(advance: Callable[[str], None]) -> Grid:
    """Compare methods on a ring whose ranks have one label of ten each, or two."""
    trials = {
        (one.title, column): Trial(one, topology.ring(_RANKS), data, training)
        for column, (data, training) in _SETTINGS.items()
        for one in METHODS
    }
    values, rates = measured(trials, advance)
    rows, columns = [one.title for one in METHODS], list(_SETTINGS)
    return Grid(
        "digits_labels", "digits: own models, few labels on each rank", rows, columns, values,
        percent, AXIS, scale=100.0,
        aims={
            better: ahead(f"> {worse}", values[better, columns[0]], values[worse, columns[0]])
            for better, worse in _BETTER
        },
        beside={row: _PUBLISHED.get(row, "") for row in rows},
        beside_name="published, CIFAR-10",
        note=f"{_STAYING.note(f'Ring of {_RANKS} ranks')}: {told_rates(rates, rows)}.",
    )  # fmt: skip
