"""Bar plot of each method's step: a panel for each link, a group for each number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.network.steps.step_tables import NetworkMeasurement
from benchmarks.network.steps.synthetic_model import ALONE
from benchmarks.plots import drawing, legend_below
from benchmarks.tables import time_text

# Okabe and Ito's colours; ours are the warm ones.
_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#F0E442")
_WIDTH = 0.8  # of a group


def _panel(axes: Axes, group: Sequence[NetworkMeasurement]) -> None:
    bar = _WIDTH / len(ALONE)
    for column, (method, color) in enumerate(zip(ALONE, _COLORS, strict=True)):
        shift = (column + 0.5) * bar - _WIDTH / 2
        shown = {
            place + shift: one.seconds[method]
            for place, one in enumerate(group)
            if method in one.seconds
        }
        axes.bar([*shown], [*shown.values()], bar, color=color, label=method)
    for place, one in enumerate(group):
        ends = (place - _WIDTH / 2, place + _WIDTH / 2)
        label = "max(compute, wire time of one model)" if place == 0 else None
        axes.plot(ends, (one.limit, one.limit), color="black", linewidth=1.2, label=label)
    axes.set_xticks(range(len(group)), [f"{one.hosts} hosts" for one in group])
    axes.set_title(group[0].link.name)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: time_text(value) if value else "0")
    )
    axes.grid(axis="y")


def draw(path: Path, found: Sequence[NetworkMeasurement]) -> None:
    """Draw all links beside each other."""
    links = list(dict.fromkeys(one.link for one in found))
    with drawing(path, 4.2 * len(links), 3.9) as figure:
        panels = figure.subplots(1, len(links), squeeze=False)[0]
        for axes, link in zip(panels, links, strict=True):
            _panel(axes, [one for one in found if one.link == link])
        panels[0].set_ylabel("time of a step")
        legend_below(figure, panels[0])
