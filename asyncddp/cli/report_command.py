"""``asyncddp report``: shows a monitored run as a table, and plots its measurements over steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from asyncddp.cli.console import format_bytes, make_console, make_table, writing
from asyncddp.cli.monitor_log import (
    MonitorLog,
    MonitorSample,
    RankSummary,
    finite_or_none,
    read_monitor_log,
    slowest_rank,
    summarise_ranks,
)
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


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("report")
@click.argument("file", type=_FILE, metavar="RUN.jsonl")
@click.option("--plot", type=_FILE, metavar="FILE", help="Write curves: run.png, run.svg, run.pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def report_command(file: Path, plot: Path | None, as_json: bool) -> None:
    """Show how the ranks of a monitored run were doing, while it goes on or afterwards.

    \b
      with asyncddp.monitor(optimizer, every=50, to="run.jsonl"):     in the training script
          ...
      asyncddp report run.jsonl --plot run.png

    The distance is how far a rank's parameters are from the average of all ranks'; it is
    estimated, within 9 percent or so, unless the monitor was told consensus="exact". Exposed is
    the share of a step in which averaging kept the rank from computing: what overlap would hide.
    Stale is how many steps the oldest of what a rank mixed was behind, for methods that do not
    wait. A share for monitoring above 1 % asks for a larger `every`.
    """  # noqa: D301 - click reads the \b
    run = read_monitor_log(file)
    every = summarise_ranks(run)
    slowest = slowest_rank(every)
    if run.truncated:
        click.echo(f"{file}: the last line is not complete; it is left out.", err=True)
    if as_json:
        ranks = [asdict(one) for one in every]
        click.echo(json.dumps({"file": str(file), "ranks": ranks, "slowest": slowest.rank}))
    else:
        _print_summary(every, slowest, file.name)
    if plot is not None:
        with writing("--plot", plot, err=as_json):
            draw_curves(run, file.name).savefig(plot)


def _print_summary(every: Sequence[RankSummary], slowest: RankSummary, title: str) -> None:
    table = make_table(title, [
        "rank", "steps", "distance", "gradient\nnorm", "step", "exposed", "sent\nper step",
        "stale\nat most", "monitor",
    ])  # fmt: skip
    for one in every:
        table.add_row(
            f"{one.rank}",
            f"{one.steps}",
            "unknown" if one.consensus_distance is None else _format_number(one.consensus_distance),
            _format_number(one.gradient_norm),
            f"{1e3 * one.step_seconds:.3g} ms",
            f"{one.exposed_share:.1%}",
            format_bytes(one.bytes_per_step),
            _format_number(one.staleness),
            f"{one.monitor_share:.2%}",
        )
    console = make_console(120)
    console.print(table)
    if len(every) > 1:
        own = 1e3 * slowest.step_seconds * (1 - slowest.exposed_share)
        text = f"Rank {slowest.rank} takes longest for its own part of a step: {own:.3g} ms."
        console.print(text)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
