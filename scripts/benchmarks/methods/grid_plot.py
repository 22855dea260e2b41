"""Pictures of grids: a line for each method, a marker for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes

from benchmarks.methods.grid import Grid, Values
from benchmarks.plots import drawing

# Okabe and Ito's colours
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#000000", "x"),
)


def draw(path: Path, grids: Sequence[Grid]) -> None:
    """Draw the grids of a problem, two in a row; a line reaches from the least to the most seed."""
    columns = min(2, len(grids))
    rows = -(-len(grids) // columns)
    height = rows * (1.3 + 0.27 * max(len(grid.rows) for grid in grids))
    with drawing(path, 1.8 + 4.3 * columns, height, dpi=130) as figure:
        every = figure.subplots(rows, columns, squeeze=False).flat
        for axes, grid in zip(every, grids, strict=False):
            _draw_grid(axes, grid)
        for axes in every[len(grids) :]:
            axes.remove()


def _draw_grid(axes: Axes, grid: Grid) -> None:
    shifts = np.linspace(-0.25, 0.25, len(grid.columns)) if len(grid.columns) > 1 else [0.0]
    for number, (column, shift) in enumerate(zip(grid.columns, shifts, strict=True)):
        color, marker = _STYLES[number % len(_STYLES)]
        found = [grid.values.get((row, column)) for row in grid.rows]
        shown = [(place + shift, one) for place, one in enumerate(found) if one and _drawn(one)]
        heights = [height for height, _ in shown]
        low, high = ([grid.scale * ends(one) for _, one in shown] for ends in (min, max))
        axes.hlines(heights, low, high, color=color, lw=1.2)
        means = [grid.scale * fmean(one) for _, one in shown]
        axes.plot(means, heights, marker, color=color, ms=4.5, label=column)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.set_ylim(len(grid.rows) - 0.4, -0.6)
    if grid.log:
        axes.set_xscale("log")
    axes.set_xlabel(grid.axis, fontsize=9)
    axes.set_title(grid.title, loc="left", fontsize=9)
    axes.grid()
    columns = min(3, len(grid.columns))
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.4, -0.55 / (1 + 0.27 * len(grid.rows))),
        ncols=columns, handletextpad=0.2, columnspacing=1.0,
    )  # fmt: skip


def _drawn(values: Values) -> bool:
    return all(map(isfinite, values))
