"""A timeline's report on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncddp.timeline.report_rank import RankReport
from asyncddp.timeline.reporting import Report
from asyncddp.timeline.units import size

__all__ = ["show_report"]

Columns: TypeAlias = Mapping[str, Callable[[RankReport], str]]

_NONE = "-"


def milliseconds(value: float | None) -> str:
    """Three digits, or a dash where it is not known.

    Example:
        >>> milliseconds(0.01234), milliseconds(12.34), milliseconds(1234.5), milliseconds(None)
        ('0.012', '12.3', '1234', '-')
    """
    if value is None:
        return _NONE
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{max(value, 0.0):.{digits}f}"


def _spread(one: RankReport) -> str:
    return f"{milliseconds(one.step_low)}-{milliseconds(one.step_high)}" if one.steps else _NONE


def _waits(one: RankReport) -> str:
    """For whom most: ``2: 19.8, 1: 0.310``."""
    if one.waited is None:
        return _NONE
    named = [(whom, long) for whom, long in one.waited if long > 0][:2]
    told = (f"{'?' if whom < 0 else whom}: {milliseconds(long)}" for whom, long in named)
    return ", ".join(told) or "nobody"


_STEPS: Columns = {
    "steps": lambda one: str(one.steps or _NONE),
    "median": lambda one: milliseconds(one.step_median),
    "10-90 %": _spread,
    "mean": lambda one: milliseconds(one.step),
}
_WHOLE: Columns = {"recorded": lambda one: milliseconds(one.recorded)}
_SHARES: Columns = {
    "compute": lambda one: milliseconds(one.compute),
    "exposed": lambda one: milliseconds(one.exposed),
    "other": lambda one: milliseconds(one.other),
    "hidden": lambda one: milliseconds(one.hidden),
}
_MESSAGES: Columns = {
    "waits for": _waits,
    "sent": lambda one: size(one.sent),
    "received": lambda one: size(one.received),
}


def show_report(console: Console, report: Report) -> None:
    """Show a row per rank, who stands out, and what is not known."""
    stepped = any(one.steps for one in report.ranks)
    times = {**(_STEPS if stepped else _WHOLE), **_SHARES}
    count = len(report.ranks)
    unit = "per step" if stepped else "in all"
    title = f"{count} rank{'s'[: count != 1]}, milliseconds and bytes {unit}"
    table = _table(report, {**times, **_MESSAGES}, title)
    wide = console.options.update(max_width=1000)
    if console.measure(table, options=wide).maximum <= console.width:
        console.print(table)
    else:  # a narrow terminal
        console.print(_table(report, times, title))
        console.print(_table(report, _MESSAGES))
    for line in _outstanding(report, " per step" * stepped):
        console.print(Text(line, style="bold"))
    console.print(_legend(stepped))
    for note in report.left_out:
        console.print(Text(note, style="yellow"))


def _table(report: Report, columns: Columns, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("rank", *columns):
        table.add_column(header, justify="right", no_wrap=True)
    for one in report.ranks:
        style = "bold" if one.rank == report.slowest else ""
        cells = (cell(one) for cell in columns.values())
        table.add_row(Text(str(one.rank), "bold cyan"), *cells, style=style)
    return table


def _outstanding(report: Report, per: str) -> list[str]:
    """Sentences on the slowest rank, and on the one that is waited for most; each rank once."""
    slow, behind = report.slowest_by_compute, report.slowest
    waited, cause = report.waited_for_most, report.holds_up
    told = [
        _slow(report, slow, "compute", "Slowest by compute", per),
        _slow(report, behind if behind != slow else None, "own", "Slowest in all it does", per),
        _waited(report, waited, "Waited for most", per),
        _waited(report, cause if cause != waited else None, "Holds up those as well", per),
    ]
    return [line for line in told if line]


def _slow(report: Report, rank: int | None, name: str, words: str, per: str) -> str:
    if rank is None:
        return ""
    mine = next(getattr(one, name) for one in report.ranks if one.rank == rank)
    others = milliseconds(report.others(rank, name))
    return f"{words}: rank {rank}, {milliseconds(mine)} ms{per}; the others {others} ms."


def _waited(report: Report, rank: int | None, words: str, per: str) -> str:
    if rank is None:
        return ""
    long = milliseconds(dict(report.waited_for)[rank])
    own = next((one.waited or () for one in report.ranks if one.rank == rank), ())
    itself = milliseconds(sum(time for _, time in own))
    return f"{words}: rank {rank}, {long} ms{per} by all others; it waits {itself} ms itself."


def _legend(stepped: bool) -> Text:
    mean = "mean       of a step = compute + exposed + other\n" * stepped
    return Text(
        f"""\
{mean}compute    forward, backward, optimizer, less what is exposed in them
exposed    held up by communication: its calls, waits and mixing
hidden     messages under way, or mixed by another thread, while it computed
waits for  rank: time, the two longest""",
        style="dim",
    )
