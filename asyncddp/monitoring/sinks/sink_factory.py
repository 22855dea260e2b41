"""Creates the sinks of monitor records that the user chose: file, TensorBoard, function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package
from asyncddp.monitoring.rank_record import Record
from asyncddp.monitoring.sinks.console_sink import ConsoleSink

logger = logging.getLogger("asyncddp")

_NOT_SCALARS = ("rank", "step", "time", "consensus_error", "departed")
_TENSORBOARD = "tensorboard:"
_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Sink(Protocol):
    """Destination of monitor records, such as a console or a file; called on rank 0 only."""

    def write(self, records: Sequence[Record]) -> None:
        """Write the records of one report, of one or several ranks."""

    def close(self) -> None:
        """Release the sink's resources; no record follows."""


class _FunctionSink:
    """Sink that calls a user's function with each record as a dict; its exceptions propagate."""

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
    """Sink that writes each rank's figures to a ``SummaryWriter``, and closes it if it owns it."""

    def __init__(self, writer: Any, *, own: bool = False) -> None:
        self._writer, self._own = writer, own

    def write(self, records: Sequence[Record]) -> None:
        """Add the figures that are known."""
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
    """Check the argument ``to`` and return a function for each sink that opens it."""
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
