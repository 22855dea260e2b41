"""Plot of the cost model over the number of ranks, with the counts as points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.scale.scale_tables import ModelCosts, WorldCounts
from benchmarks.scale.verb_counts import ALLREDUCE
from benchmarks.unit_text import time_text

__all__ = ["draw"]

_COLORS = ("#D55E00", "#E69F00", "#0072B2", "#009E73")  # Okabe and Ito's
_STYLES = ("-", "-", "-", "--")
_whole = FuncFormatter(lambda value, _: f"{value:,.0f}")
_POINTS = {"one-peer": "o", "exp-2": "^", ALLREDUCE: "s"}


def draw(
    path: Path, worlds: Sequence[WorldCounts], model: Sequence[ModelCosts], nbytes: int
) -> None:
    """Draw bytes per rank and seconds over the number of ranks, all axes logarithmic.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.4, 3.9), layout="constrained")
        sent, seconds = figure.subplots(1, 2)
        ranks = [one.ranks for one in model]
        for color, style, way in zip(_COLORS, _STYLES, model[0].costs, strict=True):
            costs = [one.costs[way] for one in model]
            shares = [cost.bytes_per_rank / nbytes for cost in costs]
            sent.plot(ranks, shares, style, color=color, label=f"{way}, model")
            seconds.plot(ranks, [cost.seconds for cost in costs], style, color=color, label=way)
        for verb, marker in _POINTS.items():
            points = [(one.ranks, found[1]) for one in worlds if (found := one.sent(verb))]
            if points:
                places, counts = zip(*points, strict=True)
                shares = [count / nbytes for count in counts]
                label = f"{verb}, counted"
                sent.plot(places, shares, marker, color="black", markersize=4, label=label)
        for axes, title in ((sent, "bytes per rank ÷ tensor"), (seconds, "seconds of one call")):
            axes.set(xscale="log", yscale="log", xlabel="ranks")
            axes.set_title(title, loc="left", fontsize=10)
            axes.grid(color="0.9", linewidth=0.6)
            axes.xaxis.set(major_locator=LogLocator(4), major_formatter=_whole)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.legend(fontsize=7.5, frameon=False)
        sent.yaxis.set(major_locator=LogLocator(2), major_formatter=_whole)
        sent.yaxis.set_minor_locator(NullLocator())
        seconds.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
        figure.savefig(path, dpi=150, bbox_inches="tight")
