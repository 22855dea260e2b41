"""Call of a test function on every rank: its description for other processes, and its execution."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import asyncddp as bf
from asyncddp.config import Config
from asyncddp.testing.outcome import Outcome
from asyncddp.transport import TRANSPORTS

RANK_FUNCTION = "body_on_ranks"
"""Attribute of a test that holds the function which its ranks run."""

DEFAULT_SETTINGS = {"timeout": 90.0, "warn_after": 75.0}
"""Default settings of a test's context: timeouts longer than any step takes on a busy machine."""


@dataclass(frozen=True)
class RankFunctionCall:
    """Call of a test function on each rank: the function, its arguments and the transport.

    Attributes:
        function: ``"module:qualified.name"``; where ``bare``, its first argument is a transport.
        bare: True to run on the transport alone, without a context.
        settings: Fields of :class:`asyncddp.config.Config`.
        path: Directories in which modules are searched.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    transport: str
    bare: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()

    @classmethod
    def name_of(cls, function: Callable[..., Any]) -> str:
        """Return the name under which other processes import a module-level function."""
        name = f"{function.__module__}:{function.__qualname__}"
        if "<" in name:
            raise TypeError(
                f"{name} is not at the top of its module, where the ranks of mpirun could import "
                "it; move it there, or use a loopback world"
            )
        return name

    def load(self) -> Callable[..., Any]:
        """Import the function; unwrap a test decorated by ``asyncddp.testing.ranks``."""
        for folder in self.path:
            if folder not in sys.path:
                sys.path.append(folder)
        module, _, name = self.function.partition(":")
        found = operator.attrgetter(name)(importlib.import_module(module))
        body: Callable[..., Any] = getattr(found, RANK_FUNCTION, found)
        return body


def capture_outcome(
    rank: int, outcomes: dict[int, Outcome], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function and store its outcome."""
    started = time.monotonic()
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        outcomes[rank] = Outcome.of(rank, time.monotonic() - started, error)
        raise
    outcomes[rank] = Outcome(rank, time.monotonic() - started, value)
    return value


def run_case(rank: int, case: RankFunctionCall) -> Outcome:
    """Run a case on this process's rank, in a new context."""
    outcomes: dict[int, Outcome] = {}
    started = time.monotonic()
    names = {item.name: item.metadata["name"] for item in fields(Config)}
    settings = {**DEFAULT_SETTINGS, **case.settings}
    try:
        # which also takes back what the case itself sets
        with mock.patch.dict("os.environ", {names[key]: str(settings[key]) for key in settings}):
            run = functools.partial(capture_outcome, rank, outcomes, case.load())
            if case.bare:
                with contextlib.closing(TRANSPORTS[case.transport]()) as transport:
                    run(transport, *case.args, **case.kwargs)
            else:
                bf.init(transport=case.transport)
                try:
                    run(*case.args, **case.kwargs)
                finally:
                    bf.shutdown()
    except BaseException as error:  # noqa: BLE001 - whatever a case raises is the test's result
        if rank not in outcomes or outcomes[rank].error is None:  # raised by the shutdown
            outcomes[rank] = Outcome.of(rank, time.monotonic() - started, error)
    return outcomes[rank]
