"""Bar plot of each method's step: a panel for each link, a group for each number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.network.steps.method_names import ALONE
from benchmarks.network.steps.step_tables import NetworkMeasurement
from benchmarks.unit_text import time_text

__all__ = ["draw"]

# Okabe and Ito's colours; ours are the warm ones.
_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#F0E442")
_WIDTH = 0.8  # of a group


def _panel(axes: Axes, group: Sequence[NetworkMeasurement]) -> None:
    bar = _WIDTH / len(ALONE)
    for column, (method, color) in enumerate(zip(ALONE, _COLORS, strict=True)):
        shown = [
            (place, one.seconds[method]) for place, one in enumerate(group) if method in one.seconds
        ]
        places = [place + (column + 0.5) * bar - _WIDTH / 2 for place, _ in shown]
        axes.bar(places, [step for _, step in shown], bar, color=color, label=method)
    for place, one in enumerate(group):
        ends = (place - _WIDTH / 2, place + _WIDTH / 2)
        label = "max(compute, wire time of one model)" if place == 0 else None
        axes.plot(ends, (one.limit, one.limit), color="black", linewidth=1.2, label=label)
    axes.set_xticks(range(len(group)), [f"{one.hosts} hosts" for one in group])
    axes.set_title(group[0].link.name, loc="left", fontsize=10)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: time_text(value) if value else "0")
    )
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def draw(path: Path, found: Sequence[NetworkMeasurement]) -> None:
    """Draw all links beside each other.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    links = list(dict.fromkeys(one.link for one in found))
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.2 * len(links), 3.9), layout="constrained")
        panels = figure.subplots(1, len(links), squeeze=False)[0]
        for axes, link in zip(panels, links, strict=True):
            _panel(axes, [one for one in found if one.link == link])
        panels[0].set_ylabel("time of a step")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False
        )
        figure.savefig(path, dpi=150, bbox_inches="tight")
