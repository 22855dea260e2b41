"""A monitored run as curves over its steps, one for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.report.records import Row, Run, finite
from asyncddp.packages import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

_NAMED = 16  # ranks up to which each has its name


@dataclass(frozen=True)
class _Panel:
    title: str
    value: Callable[[Row], float | None]
    log: bool = False


_PANELS = (
    _Panel("consensus distance", lambda row: row.consensus_distance, log=True),
    _Panel("gradient norm", lambda row: row.gradient_norm, log=True),
    _Panel("step time, ms", lambda row: 1e3 * row.step_seconds),
    _Panel("exposed, %", lambda row: _percent(row.exposed_share)),
    _Panel("staleness, steps", lambda row: row.staleness),
)


def draw(run: Run, title: str) -> Figure:
    """Draw what is known of consensus distance, gradients, step time, exposed share and staleness.

    Args:
        run: The reports.
        title: Stands above.

    Raises:
        EnvironmentProblem: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentProblem(
            f"--plot needs matplotlib; install it with {install_command('plot')}"
        ) from error
    panels = [
        panel
        for panel in _PANELS
        if any(finite(panel.value(row)) is not None for rows in run.ranks.values() for row in rows)
    ]
    figure = Figure(figsize=(8, 0.6 + 1.8 * len(panels)), layout="constrained")
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    colors = colormaps["viridis"]
    for axes, panel in zip(every, panels, strict=True):
        for place, (rank, rows) in enumerate(run.ranks.items()):
            steps, values = _curve(rows, panel)
            color = colors(0.9 * place / max(1, len(run.ranks) - 1))
            axes.plot(steps, values, ".-", color=color, label=f"rank {rank}", lw=1)
        _dress(axes, panel)
    every[0].set_title(title, loc="left")
    every[-1].set_xlabel("step")
    if 1 < len(run.ranks) <= _NAMED:
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _curve(rows: Iterable[Row], panel: _Panel) -> tuple[list[int], list[float]]:
    """The steps at which there is something to draw, and what."""
    points = [(row.step, finite(panel.value(row))) for row in rows]
    shown = [(step, y) for step, y in points if y is not None and (y > 0 or not panel.log)]
    return [step for step, _ in shown], [y for _, y in shown]


def _dress(axes: Axes, panel: _Panel) -> None:
    axes.set_ylabel(panel.title)
    axes.grid(alpha=0.3)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
