"""Plot of averages between hosts over what the model predicts of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.network.cost.averages import GLOO, OURS, SOCKETS, WITHIN, CostMeasurement
from benchmarks.plots import drawing

_STYLES = {OURS: ("#D55E00", "o"), SOCKETS: ("#0072B2", "s"), GLOO: ("#009E73", "D")}


def draw(path: Path, measured: Sequence[CostMeasurement]) -> None:
    """Draw a line for every average and network, a point for everybody who makes it."""
    found = {
        (f"{average}, {one.place}", by): ratio
        for one in measured
        for (average, by), ratio in one.ratios().items()
    }
    names = list(dict.fromkeys(name for name, _ in found))
    with drawing(path, 8.2, 1.2 + 0.26 * len(names)) as figure:
        axes = figure.subplots()
        axes.axvspan(1 - WITHIN, 1 + WITHIN, color="0.92", linewidth=0)
        axes.axvline(1, color="0.3", linewidth=0.8)
        for rival, (color, marker) in _STYLES.items():
            points = [
                (ratio, names.index(name)) for (name, by), ratio in found.items() if by == rival
            ]
            axes.plot(*zip(*points, strict=True), marker, color=color, label=rival)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(f"seconds ÷ those predicted; grey: within {WITHIN:.0%}")
        axes.grid(axis="y")
        axes.legend(loc="lower right")
