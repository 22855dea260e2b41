"""Pictures of trainings: perplexity over steps, bytes or seconds, with the seeds' spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.one_to_n.trainings import Result
from benchmarks.plots import drawing

# Okabe and Ito's colours, which the colour-blind tell apart; plain torch is grey and black.
_PLAIN: Mapping[str, tuple[str, str]] = {
    "one process": ("black", "-"),
    "one rank alone": ("0.6", ":"),
    "ddp": ("0.35", "--"),
}
_COLORS = (
    *("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#44AA99"),
)
Column: TypeAlias = tuple[str, Sequence[Result], str, bool]
_UNITS = {"step": ("steps", 1.0), "bytes": ("MB sent by a rank", 1e6), "seconds": ("seconds", 1.0)}


def _styles(columns: Sequence[Column]) -> dict[str, tuple[str, str]]:
    """Return colour and line of each method, the same in all panels."""
    colors, found = cycle(_COLORS), dict(_PLAIN)
    for _, results, _, _ in columns:
        for result in results:
            label = result.training.label
            if label not in found:
                found[label] = next(colors), "-"
    return found


def _draw_curves(
    axes: Axes, results: Sequence[Result], over: str, styles: Mapping[str, tuple[str, str]]
) -> None:
    """Draw mean and range of the seeds over steps, bytes or seconds."""
    name, unit = _UNITS[over]
    for result in results:
        label = result.training.label
        color, style = styles[label]
        along, low, middle, high = result.curve(over)
        if not along[-1]:
            continue  # sends nothing
        along = [value / unit for value in along]
        axes.plot(along, middle, style, color=color, linewidth=1.3, label=label)
        axes.fill_between(along, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(name)
    axes.grid()


def save_picture(path: Path, columns: Sequence[Column]) -> None:
    """Draw one picture of several panels.

    Args:
        path: Where to; png, pdf or svg.
        columns: Title, trainings, what they are drawn over, and whether that is logarithmic.
    """
    with drawing(path, 3.7 * len(columns) + 1.6, 3.4, dpi=100, font_size=8.5) as figure:
        every = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        shown: dict[str, Artist] = {}
        styles = _styles(columns)
        for axes, (title, results, over, logarithmic) in zip(every, columns, strict=True):
            _draw_curves(axes, results, over, styles)
            axes.set_title(title)
            if logarithmic:
                axes.set_xscale("log")
            handles, labels = axes.get_legend_handles_labels()
            shown.update(zip(labels, handles, strict=True))
        every[0].set_ylabel("perplexity of the average model")
        figure.legend([*shown.values()], [*shown], loc="outside right upper")
