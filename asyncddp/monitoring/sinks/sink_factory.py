"""Interface of a monitor's sinks, and their construction from what the user gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from asyncddp.errors import ArgumentError
from asyncddp.monitoring.rank_record import Record
from asyncddp.monitoring.sinks.console import ConsoleSink
from asyncddp.monitoring.sinks.json_lines import JsonLinesSink
from asyncddp.monitoring.sinks.tensorboard import TensorBoardSink, open_summary_writer

_TENSORBOARD = "tensorboard:"
_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Sink(Protocol):
    """Destination of monitor records, such as a console or a file; called on rank 0 only."""

    def write(self, records: Sequence[Record]) -> None:
        """Write the records of one report, of one or several ranks."""
        ...

    def close(self) -> None:
        """Release the sink's resources; no record follows."""
        ...


class _FunctionSink:
    """Sink that calls a user's function with each record as a dict; its exceptions propagate."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._function(record.as_dict())

    def close(self) -> None:
        pass


def sink_opener(to: Any, *, append: bool) -> Callable[[], list[Sink]]:
    """Check the argument ``to`` and return a function that opens its sinks."""
    several = isinstance(to, Iterable) and not isinstance(to, (str, Path))
    every = [] if to is None else list(to) if several else [to]
    constructors = [_sink_constructor(one, append=append) for one in every]
    return partial(_open_sinks, constructors)


def _open_sinks(constructors: Iterable[Callable[[], Sink]]) -> list[Sink]:
    with ExitStack() as opened:
        sinks = []
        for make in constructors:
            sinks.append(make())
            opened.callback(sinks[-1].close)
        opened.pop_all()
        return sinks


def _sink_constructor(to: Any, *, append: bool) -> Callable[[], Sink]:
    if isinstance(to, str) and to == "console":
        return ConsoleSink
    if isinstance(to, str) and to.startswith(_TENSORBOARD) and to != _TENSORBOARD:
        folder = to.removeprefix(_TENSORBOARD)
        return lambda: TensorBoardSink(open_summary_writer(folder), own=True)
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
