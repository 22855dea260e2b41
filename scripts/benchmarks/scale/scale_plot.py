"""Plot of the cost model over the number of ranks, with the counts as points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.plots import drawing
from benchmarks.scale.bench import ModelCosts, WorldCounts
from benchmarks.scale.message_counts import ALLREDUCE

_STYLES = (("#D55E00", "-"), ("#E69F00", "-"), ("#0072B2", "-"), ("#009E73", "--"))
"""Okabe and Ito's colours."""
_POINTS = {"one-peer": "o", "exp-2": "^", ALLREDUCE: "s"}


def draw(
    path: Path, worlds: Sequence[WorldCounts], model: Sequence[ModelCosts], nbytes: int
) -> None:
    """Draw bytes per rank over the number of ranks, both axes logarithmic."""
    whole = FuncFormatter(lambda value, _: f"{value:,.0f}")
    with drawing(path, 6.6, 4.2) as figure:
        axes = figure.subplots()
        ranks = [one.ranks for one in model]
        for (color, style), way in zip(_STYLES, model[0].costs, strict=True):
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
        axes.set_title("bytes per rank ÷ tensor")
        axes.grid()
        for axis, locator in (
            (axes.xaxis, LogLocator(4, numticks=20)),
            (axes.yaxis, LogLocator(2)),
        ):
            axis.set(major_locator=locator, major_formatter=whole, minor_locator=NullLocator())
        axes.legend()
