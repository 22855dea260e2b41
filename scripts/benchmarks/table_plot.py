"""Plots of benchmark tables: curves over size, or bars where a table has a single size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.tables import TimingRow, TimingTable
from benchmarks.unit_text import size_text, time_text

__all__ = ["save_plot"]

# Okabe and Ito's colours, which the colour-blind tell apart as well: warm ones are ours.
_OURS = (
    ("#D55E00", "o"),
    ("#E69F00", "^"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
    ("#882255", "X"),
    ("#999933", "d"),
)
_OTHERS = {
    "mpi4py": ("#0072B2", "s"),
    "MPI": ("#0072B2", "s"),
    "gloo": ("#009E73", "D"),
    "DDP": ("#009E73", "D"),
    "limit": ("#000000", ""),
    "pinned": ("0.5", ""),
    "local": ("0.6", ""),
}


def _styles(table: TimingTable) -> dict[str, tuple[str, str]]:
    """Colour and marker of each rival, by its name; others look the same in all tables."""
    ours = cycle(_OURS)
    return {
        rival.name: _OTHERS.get(re.split(r"\W", rival.name)[0]) or next(ours)
        for rival in table.rivals
    }


def _curves(axes: Axes, table: TimingTable, rows: Sequence[TimingRow]) -> None:
    """Median over size with the middle half of the rounds, both axes logarithmic."""
    for name, (color, marker) in _styles(table).items():
        mine = [row for row in rows if row.rival == name]
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
            linestyle="-" if marker else "--",
            linewidth=1.5,
            label=name,
        )
        axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel=f"size of the {table.size_is}")
    axes.set_ylabel("time of one call")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.tick_params(labelsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(fontsize=7.5, frameon=False)


def _bars(axes: Axes, table: TimingTable, rows: Sequence[TimingRow]) -> None:
    """Each rival's time over the one that all are compared with, and its middle half."""
    step = table.samples is not None
    reference = table.rivals[0 if step or len(table.rivals) == 1 else 1].name
    base = next((row.median for row in rows if row.rival == reference), None)
    if base is None:
        reference, base = rows[0].rival, rows[0].median
    for place, row in enumerate(rows):
        low, high = (abs(quartile - row.median) / base for quartile in row.quartiles)
        other = _OTHERS.get(re.split(r"\W", row.rival)[0])
        color = other[0] if other else _OURS[0][0]
        axes.barh(place, row.median / base, xerr=[[low], [high]], color=color, height=0.7)
        text = f" {time_text(row.median)}"
        axes.text((row.median + high * base) / base, place, text, va="center", fontsize=7.5)
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.rival for row in rows], fontsize=7.5)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"time over that of the {reference}", fontsize=9)
    axes.margins(x=0.15)


def save_plot(
    path: Path, tables: Sequence[TimingTable], rows: Sequence[TimingRow], caption: str
) -> None:
    """Draw one panel for each table that has rows.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    found = {table.key: [row for row in rows if row.table == table.key] for table in tables}
    drawn = [table for table in tables if found[table.key]]
    columns = min(2, len(drawn))
    lines = -(-len(drawn) // columns)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.6 * columns, 3.9 * lines), layout="constrained")
        # Each in a figure of its own, or the names of one's bars would push the others together.
        panels = figure.subfigures(lines, columns, squeeze=False).flat
        for panel, table in zip(panels, drawn, strict=False):
            axes = panel.subplots()
            draw = _curves if len(table.sizes) > 1 else _bars
            draw(axes, table, found[table.key])
            panel.suptitle(fill(table.title, 62), x=0.02, ha="left", fontsize=9)
        figure.text(0.01, -0.02, caption, fontsize=7.5, color="0.35")
        figure.savefig(path, dpi=150, bbox_inches="tight")
