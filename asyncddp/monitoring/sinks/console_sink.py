"""Sink that shows monitor reports as a live table on a terminal, elsewhere as lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from asyncddp.cli.console import format_bytes, make_table
from asyncddp.monitoring.rank_record import Record
from asyncddp.rank_list_text import list_ranks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_ROWS = 16
_HEADERS = (
    "rank", "step", "distance", "gradient", "step time", "exposed", "sent", "stale", "monitor",
)  # fmt: skip


class ConsoleSink:
    """Sink that shows the newest figures of all ranks on a terminal, or prints them as lines.

    A line is printed with each report of rank 0: the median over ranks and the worst.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console()
        self._newest: dict[int, Record] = {}
        self._live: Live | None = None

    def write(self, records: Sequence[Record]) -> None:
        """Show the records."""
        self._newest.update({record.rank: record for record in records})
        every = [self._newest[rank] for rank in sorted(self._newest)]
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._show(_table(every))
        elif any(record.rank == 0 for record in records):
            self._console.print(_line(every), highlight=False, soft_wrap=True, markup=False)

    def _show(self, table: Table) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Stop updating the table."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _table(every: Sequence[Record]) -> Table:
    table = make_table(None, _HEADERS)
    table.caption = _departures(every).removeprefix("; ") or None
    if len(every) <= _ROWS:
        for record in every:
            table.add_row(f"{record.rank}", *_cells([record], max))
        return table
    table.add_row("median", *_cells(every, statistics.median))
    table.add_row("worst", *_cells(every, max))
    return table


def _line(every: Sequence[Record]) -> str:
    pairs = zip(_HEADERS[1:], _cells(every, statistics.median), _cells(every, max), strict=True)
    parts = []
    for name, median, worst in pairs:
        if name == "step":
            parts.append(f"step {every[0].step}")
        elif worst != "-":
            parts.append(f"{name} {median}" + (f" (worst {worst})" if worst != median else ""))
    return "monitor: " + ", ".join(parts) + _departures(every)


def _departures(every: Sequence[Record]) -> str:
    left = {rank for record in every for rank in record.departed}
    takers = [record.rank for record in every if record.departed]
    if not left:
        return ""
    return f"; left the averaging: {list_ranks(left)}, whose weight {list_ranks(takers)} keep"


def _cells(every: Sequence[Record], over: Callable[[Iterable[float]], float]) -> list[str]:
    """Format the figures of some ranks, in the order of the headers."""

    def seen(values: Iterable[float | None], form: Callable[[float], str]) -> str:
        known = [value for value in values if value is not None]
        return form(over(known)) if known else "-"

    distance = seen((r.consensus_distance for r in every), lambda x: f"{x:.3g}")
    if distance == "-" and any(r.consensus_error is not None for r in every):
        distance = "unknown yet"  # while not all ranks have reported once
    return [
        seen((r.step for r in every), lambda x: f"{x:.0f}"),
        distance,
        seen((r.gradient_norm for r in every), lambda x: f"{x:.3g}"),
        seen((r.step_seconds for r in every), lambda x: f"{1e3 * x:.3g} ms"),
        seen((_share(r.exposed_seconds, r) for r in every), lambda x: f"{x:.1%}"),
        seen((r.bytes_sent for r in every), format_bytes),
        seen((r.staleness for r in every), lambda x: f"{x:g}"),
        seen((_share(r.monitor_seconds, r) for r in every), lambda x: f"{x:.2%}"),
    ]


def _share(seconds: float, record: Record) -> float | None:
    return seconds / record.step_seconds if record.step_seconds else None
