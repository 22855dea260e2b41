"""Plot of the cost model over the number of ranks, with the counts as points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.scale.scale_tables import ModelCosts, WorldCounts
from benchmarks.scale.verb_counts import ALLREDUCE

__all__ = ["draw"]

_COLORS = ("#D55E00", "#E69F00", "#0072B2", "#009E73")  # Okabe and Ito's
_STYLES = ("-", "-", "-", "--")
_whole = FuncFormatter(lambda value, _: f"{value:,.0f}")
_POINTS = {"one-peer": "o", "exp-2": "^", ALLREDUCE: "s"}


def draw(
    path: Path, worlds: Sequence[WorldCounts], model: Sequence[ModelCosts], nbytes: int
) -> None:
    """Draw bytes per rank over the number of ranks, both axes logarithmic.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.6, 4.2), layout="constrained")
        axes = figure.subplots()
        ranks = [one.ranks for one in model]
        for color, style, way in zip(_COLORS, _STYLES, model[0].costs, strict=True):
            shares = [one.costs[way].bytes_per_rank / nbytes for one in model]
            axes.plot(ranks, shares, style, color=color, label=f"{way}, model")
        for verb, marker in _POINTS.items():
            points = [(one.ranks, found[1]) for one in worlds if (found := one.sent(verb))]
            if points:
                places, counts = zip(*points, strict=True)
                shares = [count / nbytes for count in counts]
                label = f"{verb}, counted"
                axes.plot(places, shares, marker, color="black", markersize=4, label=label)
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_title("bytes per rank ÷ tensor", loc="left", fontsize=10)
        axes.grid(color="0.9", linewidth=0.6)
        axes.xaxis.set(major_locator=LogLocator(4, numticks=20), major_formatter=_whole)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set(major_locator=LogLocator(2), major_formatter=_whole)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, frameon=False)
        figure.savefig(path, dpi=150, bbox_inches="tight")
