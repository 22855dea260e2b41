"""The tables as curves over size, both axes logarithmic, with the middle half of the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.contract import Row, Table
from benchmarks.report import size_text, time_text

__all__ = ["save_plot"]

# Okabe and Ito's colours, which the colour-blind tell apart as well; ours is the first.
_STYLES = (
    ("#D55E00", "o"),
    ("#0072B2", "s"),
    ("#E69F00", "^"),
    ("#009E73", "D"),
    ("#000000", ""),
    ("#CC79A7", "v"),
)


def _draw(axes: Axes, table: Table, rows: Sequence[Row]) -> None:
    for rival, (color, marker) in zip(table.rivals, _STYLES, strict=False):
        mine = [row for row in rows if row.table == table.key and row.rival == rival.name]
        if not mine:
            continue
        sizes = [row.nbytes for row in mine]
        low, high = zip(*(row.quartiles for row in mine), strict=True)
        axes.plot(
            sizes,
            [row.median for row in mine],
            color=color,
            marker=marker,
            markersize=4,
            linestyle="--" if not marker else "-",
            linewidth=1.5,
            label=rival.name,
        )
        axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel=f"size of the {table.size_is}")
    axes.set_title(table.title, loc="left", fontsize=10)
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(fontsize=7.5, frameon=False)


def save_plot(path: Path, tables: Sequence[Table], rows: Sequence[Row], caption: str) -> None:
    """Draw one panel for each table.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    columns = min(2, len(tables))
    lines = -(-len(tables) // columns)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.2 * columns, 3.9 * lines), layout="constrained")
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, table in zip(panels, tables, strict=False):
            _draw(axes, table, rows)
            axes.set_ylabel("time of one call")
        for axes in panels[len(tables) :]:
            axes.set_visible(False)
        figure.text(0.01, -0.02, caption, fontsize=7.5, color="0.35")
        figure.savefig(path, dpi=150, bbox_inches="tight")
