"""Worlds to run cases in: threads of this process, or processes under ``mpirun``."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import asyncddp as bf
from asyncddp.errors import EnvironmentProblem
from asyncddp.packages import install_command
from asyncddp.testing.case import DEFAULTS, Case, recorded
from asyncddp.testing.outcome import Outcome, values
from asyncddp.transport import TRANSPORTS
from asyncddp.transport.loopback import Loopback

__all__ = ["WORLDS", "LoopbackWorld", "PoolWorld", "World", "open_world", "world_of"]


class World(ABC):
    """``size`` ranks on which a test runs its cases, each in a fresh world.

    Attributes:
        wire: Name of the transport.
        size: Number of ranks.
    """

    wire: str
    size: int

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``case(*args, **kwargs)`` on every rank; element r is what rank r returned.

        Args:
            case: A function; where ranks are processes, at the top of an importable module.
            *args: Its positional arguments, which pickle can carry.
            **kwargs: Its keyword arguments; ``settings`` are the world's, as of ``Config``, and
                ``limit`` is the time in seconds after which processes count as hanging.

        Raises:
            RanksFailedError: A rank raised; the message has the tracebacks of all that did.
        """
        return values(self.outcomes(case, *args, **kwargs))

    @abstractmethod
    def outcomes(
        self,
        case: Callable[..., Any],
        *args: Any,
        settings: Mapping[str, Any] | None = None,
        limit: float = 120.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Like :meth:`run`, and tell of every rank how it ended."""

    @abstractmethod
    def run_bare(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``case(transport, *args, **kwargs)`` on every rank, without a world above it."""

    @abstractmethod
    def close(self) -> None:
        """End what runs."""


class LoopbackWorld(World):
    """Ranks that are threads of this process.

    Args:
        size: How many.

    Example:
        >>> import asyncddp as bf
        >>> LoopbackWorld(3).run(lambda: bf.rank() + bf.size())
        [3, 4, 5]
    """

    wire = "loopback"

    def __init__(self, size: int) -> None:
        self.size = size

    def outcomes(
        self,
        case: Callable[..., Any],
        *args: Any,
        settings: Mapping[str, Any] | None = None,
        limit: float = 120.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run a case in a world of threads."""
        del limit  # pytest's own ends the process
        found: dict[int, Outcome] = {}

        def body() -> None:
            """Run the case on one rank, and keep what came."""
            recorded(bf.rank(), found, case, *args, **kwargs)

        try:
            with bf.local_world(self.size, **{**DEFAULTS, **(settings or {})}) as world:
                world.run(body)
        except bf.AsyncDDPError:
            if all(outcome.error is None for outcome in found.values()):
                raise  # the world's end found something that no rank had seen
        return [found[rank] for rank in range(self.size)]

    def run_bare(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a case over ends of a wire within the process."""
        ends = Loopback.group(self.size)
        with bf.local_world(self.size, **DEFAULTS) as world:
            return world.run(lambda: case(ends[bf.rank()], *args, **kwargs))

    def close(self) -> None:
        """Nothing runs between two cases."""


class PoolWorld(World):
    """Ranks that are processes under ``mpirun``; they stay up from case to case until closed.

    Args:
        wire: Name of a transport between processes, such as ``"mpi"``.
        size: How many.

    Raises:
        EnvironmentProblem: psutil is not installed, which ends processes that hang.
    """

    def __init__(self, wire: str, size: int) -> None:
        try:
            from asyncddp.testing.pool import Pool
        except ImportError as error:
            raise EnvironmentProblem(
                f"asyncddp.testing: ranks that are processes need psutil ({error}); install it "
                f"with {install_command('testing')}"
            ) from error
        self.wire, self.size = wire, size
        self._pool = Pool(size)

    def _perform(
        self,
        case: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        bare: bool,
        limit: float,
    ) -> list[Outcome]:
        name = Case.name_of(case)
        path = tuple(sys.path)
        task = Case(name, args, kwargs, self.wire, bare=bare, settings=settings, path=path)
        return self._pool.perform(task, limit)

    def outcomes(
        self,
        case: Callable[..., Any],
        *args: Any,
        settings: Mapping[str, Any] | None = None,
        limit: float = 120.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run a case on the processes, which are started where they are not up."""
        return self._perform(case, args, kwargs, settings or {}, bare=False, limit=limit)

    def run_bare(
        self, case: Callable[..., Any], *args: Any, limit: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Run a case over the processes' wire."""
        return values(self._perform(case, args, kwargs, {}, bare=True, limit=limit))

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _worlds() -> dict[str, tuple[str, int]]:
    """One name for each wire of the registry and number of ranks."""
    found = {}
    for wire in TRANSPORTS:
        for size in (1, 2, 4) if wire == "loopback" else (2, 4):
            found[f"{wire}-{size}"] = (wire, size)
    return found


WORLDS = _worlds()
"""``{"loopback-4": ("loopback", 4), "mpi-2": ("mpi", 2), …}``"""


def world_of(wire: str, size: int) -> World:
    """Ranks of a wire: threads for ``"loopback"``, else processes."""
    return LoopbackWorld(size) if wire == "loopback" else PoolWorld(wire, size)


@contextmanager
def open_world(name: str) -> Iterator[World]:
    """A world of :data:`WORLDS`, closed in the end."""
    world = world_of(*WORLDS[name])
    try:
        yield world
    finally:
        world.close()
