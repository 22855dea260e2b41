"""Plots: of tables of timings, curves over size, or bars where a table has a single size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.tables import TimingRow, TimingTable, size_text, time_text

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
    "floor": ("0.35", ""),
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
        medians, line = [row.median for row in mine], "-" if marker else "--"
        axes.plot(sizes, medians, line, color=color, marker=marker, ms=4, lw=1.5, label=name)
        axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel=f"size of the {table.size_is}")
    axes.set_ylabel("time of one call")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid()
    axes.legend(fontsize=7.5)


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
    axes.set_xlabel(f"time over that of the {reference}", fontsize=9)
    axes.margins(x=0.15)


_STYLE = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
}


@contextmanager
def drawing(
    path: Path, width: float, height: float, dpi: int = 150, font_size: float = 10
) -> Iterator[Figure]:
    """Make a figure, and save it when it has been drawn.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    style: Any = {**_STYLE, "font.size": font_size}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, dpi=dpi, bbox_inches="tight")


def draw_bars(
    path: Path,
    names: Sequence[str],
    series: Mapping[str, tuple[Sequence[float], str | Sequence[str]]],
    label: str,
    height: float = 0.35,
) -> None:
    """Draw horizontal bars.

    Args:
        path: Where to; png, pdf or svg.
        names: Of the rows.
        series: Values and colour, or a colour of each, by the name in the legend.
        label: Of the values' axis.
        height: Of a row, in inches.
    """
    with drawing(path, 7.2, 0.8 + height * len(names)) as figure:
        axes = figure.subplots()
        thick = 0.8 / len(series)
        for number, (name, (values, color)) in enumerate(series.items()):
            shift = (number - (len(series) - 1) / 2) * thick
            places = [place + shift for place in range(len(names))]
            axes.barh(places, values, height=thick, color=color, label=name)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.grid(axis="x")
        if len(series) > 1:
            legend_below(figure, axes)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put what is drawn in one panel into a legend below all."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def save_plot(
    path: Path, tables: Sequence[TimingTable], rows: Sequence[TimingRow], caption: str
) -> None:
    """Draw one panel for each table that has rows."""
    found = {table.key: [row for row in rows if row.table == table.key] for table in tables}
    drawn = [table for table in tables if found[table.key]]
    columns = min(2, len(drawn))
    lines = -(-len(drawn) // columns)
    with drawing(path, 5.6 * columns, 3.9 * lines) as figure:
        # Each in a figure of its own, or the names of one's bars would push the others together.
        panels = figure.subfigures(lines, columns, squeeze=False).flat
        for panel, table in zip(panels, drawn, strict=False):
            draw = _curves if len(table.sizes) > 1 else _bars
            draw(panel.subplots(), table, found[table.key])
            panel.suptitle(fill(table.title, 62), x=0.02, ha="left", fontsize=9)
        figure.text(0.01, -0.02, caption, fontsize=7.5, color="0.35")
