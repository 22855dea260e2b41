"""From what a user gives as ``to`` to sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from asyncddp.errors import ArgumentError
from asyncddp.monitoring.sinks.console import ConsoleSink
from asyncddp.monitoring.sinks.contract import Sink
from asyncddp.monitoring.sinks.function import FunctionSink
from asyncddp.monitoring.sinks.json_lines import JsonLinesSink
from asyncddp.monitoring.sinks.tensorboard import TensorBoardSink, writer_in

__all__ = ["opener"]

_TENSORBOARD = "tensorboard:"
_SUFFIXES = (".jsonl", ".ndjson", ".json")


def opener(to: Any, *, again: bool) -> Callable[[], list[Sink]]:
    """Check where reports are to go, and give a function that opens it.

    Args:
        to: As of :func:`asyncddp.monitor`.
        again: Whether files are continued.

    Raises:
        ArgumentError: It is nothing that reports can go to.
    """
    several = isinstance(to, Iterable) and not isinstance(to, (str, Path))
    every = [] if to is None else list(to) if several else [to]
    makers = [_maker(one, again=again) for one in every]
    return partial(_opened, makers)


def _opened(makers: Iterable[Callable[[], Sink]]) -> list[Sink]:
    with ExitStack() as opened:
        sinks = []
        for make in makers:
            sinks.append(make())
            opened.callback(sinks[-1].close)
        opened.pop_all()
        return sinks


def _maker(to: Any, *, again: bool) -> Callable[[], Sink]:
    if isinstance(to, str) and to == "console":
        return ConsoleSink
    if isinstance(to, str) and to.startswith(_TENSORBOARD) and to != _TENSORBOARD:
        folder = to.removeprefix(_TENSORBOARD)
        return lambda: TensorBoardSink(writer_in(folder), own=True)
    if isinstance(to, Path) or (isinstance(to, str) and to.endswith(_SUFFIXES)):
        return partial(JsonLinesSink, Path(to), again=again)
    if callable(getattr(to, "add_scalar", None)) and callable(getattr(to, "flush", None)):
        return partial(TensorBoardSink, to)
    if callable(to):
        return partial(FunctionSink, to)
    given = repr(to) if isinstance(to, str) else type(to).__name__
    raise ArgumentError(
        "monitor: argument to: expected 'console', a file such as 'run.jsonl', 'tensorboard:DIR', "
        f"a SummaryWriter, a function of a dict, or a list of these, got {given}"
    )
