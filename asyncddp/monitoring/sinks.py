"""Sinks of monitor reports: console, JSON lines, TensorBoard, or a user's function."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncddp.cli.console import format_bytes, make_table
from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package
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
    """Sink that shows all ranks' latest measurements on a terminal, or prints them as lines.

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
    """Format the measurements of some ranks, in the order of the table's headers."""

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


logger = logging.getLogger("asyncddp")

_NOT_SCALARS = ("rank", "step", "time", "consensus_error", "departed")
_TENSORBOARD = "tensorboard:"
_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Sink(Protocol):
    """Interface of destinations of monitor records, such as a console or a file, on rank 0."""

    def write(self, records: Sequence[Record]) -> None:
        """Write the records of one report, from one or several ranks."""

    def close(self) -> None:
        """Release the sink's resources; no records follow."""


class _FunctionSink:
    """Sink that calls a user's function with each record as a dict; exceptions propagate."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._function(record.as_dict())

    def close(self) -> None:
        pass


class JsonLinesSink:
    """Sink that writes one JSON object per rank and report, unbuffered.

    A disk that is full ends the file with a warning, not the run.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if append else "wb", buffering=0)
        except OSError as error:
            raise ArgumentError(
                f"monitor: argument to: cannot write {path}: {error.strerror}; give a file in a "
                "folder that rank 0 can write to"
            ) from error

    def write(self, records: Sequence[Record]) -> None:
        """Append a line for each record."""
        if self._file.closed:
            return
        try:
            self._file.write("".join(record.as_json() + "\n" for record in records).encode())
        except OSError as error:
            logger.warning("monitor: %s: %s; it ends here", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Sink that writes measurements to a TensorBoard ``SummaryWriter``, and may own that writer."""

    def __init__(self, writer: Any, *, own: bool = False) -> None:
        self._writer, self._own = writer, own

    def write(self, records: Sequence[Record]) -> None:
        """Add all measurements that are known."""
        for record in records:
            for name, value in record.as_dict().items():
                if name not in _NOT_SCALARS and value is not None:
                    tag = f"asyncddp/{name}/rank {record.rank}"
                    self._writer.add_scalar(tag, value, record.step, record.time)

    def close(self) -> None:
        """Flush the writer."""
        self._writer.flush()
        if self._own:
            self._writer.close()


def _open_summary_writer(folder: str) -> Any:
    with needed_package(f"monitor: 'tensorboard:{folder}' needs TensorBoard", "monitor"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(folder)


def sink_constructors(to: Any, *, append: bool) -> list[Callable[[], Sink]]:
    """Check the argument ``to``, and return one function per sink that opens it."""
    several = isinstance(to, Iterable) and not isinstance(to, (str, Path))
    every = [] if to is None else list(to) if several else [to]
    return [_sink_constructor(one, append=append) for one in every]


def _sink_constructor(to: Any, *, append: bool) -> Callable[[], Sink]:
    if isinstance(to, str) and to == "console":
        return ConsoleSink
    if isinstance(to, str) and to.startswith(_TENSORBOARD) and to != _TENSORBOARD:
        folder = to.removeprefix(_TENSORBOARD)
        return lambda: TensorBoardSink(_open_summary_writer(folder), own=True)
    if isinstance(to, Path) or (isinstance(to, str) and to.endswith(_SUFFIXES)):
        return partial(JsonLinesSink, Path(to), append=append)
    if callable(getattr(to, "add_scalar", None)) and callable(getattr(to, "flush", None)):
        return partial(TensorBoardSink, to)
    if callable(to):
        return partial(_FunctionSink, to)
    given = repr(to) if isinstance(to, str) else type(to).__name__
    raise ArgumentError(
        "monitor: argument to: expected 'console', a file such as 'run.jsonl', 'tensorboard:DIR', "
        f"a SummaryWriter, a function of a dict, or a list of these, got {given}"
    )
