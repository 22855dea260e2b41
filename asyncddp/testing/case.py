"""A case: a function that runs on every rank, and how a rank performs it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import asyncddp as bf
from asyncddp.config import Config
from asyncddp.testing.outcome import Outcome
from asyncddp.transport import TRANSPORTS

__all__ = ["BODY", "DEFAULTS", "Case", "perform", "recorded"]

BODY = "body_on_ranks"
"""Attribute under which a test keeps what its ranks run."""

DEFAULTS = {"timeout": 90.0, "warn_after": 75.0}
"""Settings of a test's world, where it gives no others; nothing takes as long, even on a machine
that is busy with other work."""


@dataclass(frozen=True)
class Case:
    """A function of a module, its arguments and the world that it wants.

    Attributes:
        function: ``"module:qualified.name"``.
        args, kwargs: Its arguments; it is called with a bare transport first where ``bare``.
        transport: Name of the wire.
        bare: Whether it wants the transport alone, without a world.
        settings: Fields of :class:`asyncddp.config.Config`.
        path: Where modules are looked for.
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
        """How other processes find a function; it must stand at the top of a module.

        Raises:
            TypeError: It does not.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        if "<" in name:
            raise TypeError(
                f"{name} is not at the top of its module, where the ranks of mpirun could import "
                "it; move it there, or use a loopback world"
            )
        return name

    def load(self) -> Callable[..., Any]:
        """Import the function; of a test that :func:`asyncddp.testing.ranks` has made, its body."""
        for folder in self.path:
            if folder not in sys.path:
                sys.path.append(folder)
        module, _, name = self.function.partition(":")
        found: Any = importlib.import_module(module)
        found = functools.reduce(getattr, name.split("."), found)
        body: Callable[..., Any] = getattr(found, BODY, found)
        return body


def recorded(
    rank: int, outcomes: dict[int, Outcome], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function and note its outcome; what it raises goes on."""
    started = time.monotonic()
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        outcomes[rank] = Outcome.of(rank, time.monotonic() - started, error)
        raise
    outcomes[rank] = Outcome(rank, time.monotonic() - started, value)
    return value


def perform(rank: int, case: Case) -> Outcome:
    """Run a case on this process's rank, in a world of its own."""
    outcomes: dict[int, Outcome] = {}
    started = time.monotonic()
    try:
        with _variables(case):
            if case.bare:
                _perform_bare(rank, outcomes, case)
            else:
                _perform_in_world(rank, outcomes, case)
    except BaseException as error:  # noqa: BLE001 - whatever a case raises is the test's result
        if rank not in outcomes or outcomes[rank].error is None:  # raised by the world's end
            outcomes[rank] = Outcome.of(rank, time.monotonic() - started, error)
    return outcomes[rank]


def _perform_bare(rank: int, outcomes: dict[int, Outcome], case: Case) -> None:
    wire = TRANSPORTS[case.transport]()
    try:
        recorded(rank, outcomes, case.load(), wire, *case.args, **case.kwargs)
    finally:
        wire.close()


def _perform_in_world(rank: int, outcomes: dict[int, Outcome], case: Case) -> None:
    function = case.load()
    bf.init(transport=case.transport)
    try:
        recorded(rank, outcomes, function, *case.args, **case.kwargs)
    finally:
        bf.shutdown()


@contextmanager
def _variables(case: Case) -> Iterator[None]:
    """The case's settings, as environment variables for the time of the case."""
    names = {item.name: item.metadata["name"] for item in fields(Config)}
    before = dict(os.environ)
    for key, value in {**DEFAULTS, **case.settings}.items():
        os.environ[names[key]] = str(value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
