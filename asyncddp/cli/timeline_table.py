"""Table of a timeline report on the terminal: a row per rank, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncddp.cli.console import format_bytes, make_table
from asyncddp.timeline.report.rank_breakdown import RankBreakdown
from asyncddp.timeline.report.timeline_report import TimelineReport

Columns: TypeAlias = Mapping[str, Callable[[RankBreakdown], str]]


def format_milliseconds(value: float | None) -> str:
    """Format milliseconds with three significant digits; a dash if unknown.

    Example:
        >>> [format_milliseconds(time) for time in (0.01234, 12.34, 1234.5, None)]
        ['0.012', '12.3', '1234', '-']
    """
    if value is None:
        return "-"
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{max(value, 0.0):.{digits}f}"


def _format_percentiles(one: RankBreakdown) -> str:
    low, high = format_milliseconds(one.step_low), format_milliseconds(one.step_high)
    return f"{low}-{high}" if one.steps else "-"


def _format_waits(one: RankBreakdown) -> str:
    """Format the ranks waited for longest, such as ``2: 19.8, 1: 0.310``."""
    if one.waited is None:
        return "-"
    named = [(whom, long) for whom, long in one.waited if long > 0][:2]
    told = (f"{'?' if whom < 0 else whom}: {format_milliseconds(long)}" for whom, long in named)
    return ", ".join(told) or "nobody"


def _time_column(name: str) -> Callable[[RankBreakdown], str]:
    return lambda one: format_milliseconds(getattr(one, name))


_STEPS: Columns = {
    "steps": lambda one: str(one.steps or "-"),
    "median": _time_column("step_median"),
    "10-90 %": _format_percentiles,
    "mean": _time_column("step"),
}
_WHOLE: Columns = {"recorded": _time_column("recorded")}
_SHARES: Columns = {name: _time_column(name) for name in ("compute", "exposed", "other", "hidden")}
_MESSAGES: Columns = {
    "waits for": _format_waits,
    "sent": lambda one: format_bytes(one.sent),
    "received": lambda one: format_bytes(one.received),
}


def show_report(console: Console, report: TimelineReport) -> None:
    """Print one row per rank, sentences about the slowest ranks, and notes on missing data."""
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
    for line in _notable_ranks(report, " per step" * stepped):
        console.print(Text(line, style="bold"))
    console.print(_legend(stepped))
    for note in report.left_out:
        console.print(Text(note, style="yellow"))


def _table(report: TimelineReport, columns: Columns, title: str | None = None) -> Table:
    table = make_table(title, ("rank", *columns))
    for one in report.ranks:
        style = "bold" if one.rank == report.slowest else ""
        cells = (cell(one) for cell in columns.values())
        table.add_row(Text(str(one.rank), "bold cyan"), *cells, style=style)
    return table


def _notable_ranks(report: TimelineReport, per: str) -> list[str]:
    ranks = {one.rank: one for one in report.ranks}

    def slow(words: str, rank: int | None, name: str) -> str | None:
        if rank is None:
            return None
        mine = format_milliseconds(getattr(ranks[rank], name))
        others = format_milliseconds(report.others(rank, name))
        return f"{words}: rank {rank}, {mine} ms{per}; the others {others} ms."

    def waited(words: str, rank: int | None) -> str | None:
        if rank is None:
            return None
        long = format_milliseconds(dict(report.waited_for)[rank])
        own = (ranks[rank].waited if rank in ranks else None) or ()
        itself = format_milliseconds(sum(time for _, time in own))
        return f"{words}: rank {rank}, {long} ms{per} by all others; it waits {itself} ms itself."

    compute, most = report.slowest_by_compute, report.waited_for_most
    own = report.slowest if report.slowest != compute else None
    cause = report.holds_up if report.holds_up != most else None
    told = [slow("Slowest by compute", compute, "compute")]
    told += [slow("Slowest in all it does", own, "own"), waited("Waited for most", most)]
    return list(filter(None, [*told, waited("Holds up those as well", cause)]))


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
