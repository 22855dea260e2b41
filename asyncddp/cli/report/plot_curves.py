"""Plots a monitored run: consensus distance, gradient norm, times and staleness over steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from asyncddp.cli.report.monitor_log import MonitorLog, MonitorSample, finite_or_none
from asyncddp.install_commands import needed_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 16  # ranks up to which each has its name


class _Subplot(NamedTuple):
    title: str
    value: Callable[[MonitorSample], float | None]
    log: bool = False


_PANELS = (
    _Subplot("consensus distance", lambda row: row.consensus_distance, log=True),
    _Subplot("gradient norm", lambda row: row.gradient_norm, log=True),
    _Subplot("step time, ms", lambda row: 1e3 * row.step_seconds),
    _Subplot("exposed, %", lambda row: row.exposed_share and 100 * row.exposed_share),
    _Subplot("staleness, steps", lambda row: row.staleness),
)


def draw_curves(run: MonitorLog, title: str) -> Figure:
    """Plot consensus distance, gradient norm, step time, exposed share and staleness."""
    with needed_package("--plot needs matplotlib", "plot"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    samples = [row for rows in run.ranks.values() for row in rows]
    known = (any(finite_or_none(one.value(row)) is not None for row in samples) for one in _PANELS)
    panels = list(compress(_PANELS, known))
    figure = Figure(figsize=(8, 0.6 + 1.8 * len(panels)), layout="constrained")
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    colors = colormaps["viridis"]
    for axes, panel in zip(every, panels, strict=True):
        for place, (rank, rows) in enumerate(run.ranks.items()):
            steps, values = _curve_points(rows, panel)
            color = colors(0.9 * place / max(1, len(run.ranks) - 1))
            axes.plot(steps, values, ".-", color=color, label=f"rank {rank}", lw=1)
        axes.set_ylabel(panel.title)
        axes.grid(alpha=0.3)
        axes.set(**{"yscale": "log"} if panel.log else {"ylim": (0, None)})
    every[0].set_title(title, loc="left")
    every[-1].set_xlabel("step")
    if 1 < len(run.ranks) <= _NAMED:
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _curve_points(rows: Iterable[MonitorSample], panel: _Subplot) -> tuple[list[int], list[float]]:
    points = [(row.step, finite_or_none(panel.value(row))) for row in rows]
    shown = [(step, y) for step, y in points if y is not None and (y > 0 or not panel.log)]
    return [step for step, _ in shown], [y for _, y in shown]
