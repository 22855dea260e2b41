"""Plot of averages between hosts over what the model predicts of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.network.cost.averages import GLOO, OURS, SOCKETS, WITHIN, CostMeasurement

__all__ = ["draw"]

_STYLES = {OURS: ("#D55E00", "o"), SOCKETS: ("#0072B2", "s"), GLOO: ("#009E73", "D")}


def draw(path: Path, measured: Sequence[CostMeasurement]) -> None:
    """Draw a line for every average and network, a point for everybody who makes it.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    names = list(
        dict.fromkeys(f"{average}, {one.place}" for one in measured for average, _ in one.ratios())
    )
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.2, 1.2 + 0.26 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(1 - WITHIN, 1 + WITHIN, color="0.92", linewidth=0)
        axes.axvline(1, color="0.3", linewidth=0.8)
        for rival, (color, marker) in _STYLES.items():
            points = [
                (ratio, names.index(f"{average}, {one.place}"))
                for one in measured
                for (average, by), ratio in one.ratios().items()
                if by == rival
            ]
            axes.plot(*zip(*points, strict=True), marker, color=color, label=rival)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(f"seconds ÷ those predicted; grey: within {WITHIN:.0%}")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
        figure.savefig(path, dpi=150, bbox_inches="tight")
