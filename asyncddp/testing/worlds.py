"""Worlds for test cases: groups of ranks that are threads of this process, or processes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import asyncddp as bf
from asyncddp.install_commands import needed_package
from asyncddp.testing.outcome import Outcome, returned_values
from asyncddp.testing.rank_function_call import DEFAULT_SETTINGS, RankFunctionCall, capture_outcome
from asyncddp.transport.loopback import LoopbackTransport

Case: TypeAlias = Callable[..., Any]


class World(ABC):
    """Base class of groups of ``size`` ranks for test cases; each case gets a new context.

    Attributes:
        transport: Name of the transport.
        size: Number of ranks.
    """

    transport: str
    size: int

    def run(self, case: Case, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``case(*args, **kwargs)`` on every rank; element r is what rank r returned.

        Args:
            case: A function; where ranks are processes, at the top of an importable module.
            *args: Its positional arguments, which pickle can carry.
            **kwargs: Its keyword arguments; ``settings`` are the world's, as of ``Config``, and
                ``limit`` is the time in seconds after which processes count as hanging.

        Raises:
            RanksFailedError: A rank raised; the message has the tracebacks of all that did.
        """
        return returned_values(self.outcomes(case, *args, **kwargs))

    def outcomes(
        self,
        case: Case,
        *args: Any,
        settings: Mapping[str, Any] | None = None,
        limit: float = 120.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run a case like :meth:`run`, but return the outcome of every rank."""
        return self._run_case(case, args, kwargs, settings or {}, limit)

    @abstractmethod
    def _run_case(
        self, case: Case, args: Any, kwargs: Any, settings: Mapping[str, Any], limit: float
    ) -> list[Outcome]: ...

    @abstractmethod
    def run_bare(self, case: Case, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``case(transport, *args, **kwargs)`` on every rank, without a context."""

    def close(self) -> None:  # noqa: B027 - threads end with each case
        """Terminate the ranks."""


class LoopbackWorld(World):
    """Group of ``size`` ranks that are threads of this process.

    Example:
        >>> import asyncddp as bf
        >>> LoopbackWorld(3).run(lambda: bf.rank() + bf.size())
        [3, 4, 5]
    """

    transport = "loopback"

    def __init__(self, size: int) -> None:
        self.size = size

    def _run_case(
        self, case: Case, args: Any, kwargs: Any, settings: Mapping[str, Any], limit: float
    ) -> list[Outcome]:
        del limit  # pytest's own ends the process
        found: dict[int, Outcome] = {}

        def body() -> None:
            capture_outcome(bf.rank(), found, case, *args, **kwargs)

        try:
            with bf.local_world(self.size, **{**DEFAULT_SETTINGS, **settings}) as world:
                world.run(body)
        except bf.AsyncDDPError:
            if all(outcome.error is None for outcome in found.values()):
                raise  # the world's end found something that no rank had seen
        return [found[rank] for rank in range(self.size)]

    def run_bare(self, case: Case, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a case over loopback transports within the process."""
        ends = LoopbackTransport.group(self.size)
        with bf.local_world(self.size, **DEFAULT_SETTINGS) as world:
            return world.run(lambda: case(ends[bf.rank()], *args, **kwargs))


class PoolWorld(World):
    """Group of ``size`` ranks that are processes under a launcher, kept running until closed.

    ``transport`` connects processes, such as ``"mpi"``, or ``"c10d"`` without MPI.

    Raises:
        EnvironmentProblem: psutil is not installed, which ends processes that hang.
    """

    def __init__(self, transport: str, size: int) -> None:
        with needed_package("asyncddp.testing: ranks that are processes need psutil", "testing"):
            from asyncddp.testing.process_pool import ProcessPool
        self.transport, self.size = transport, size
        self._pool = ProcessPool(size, transport)

    def _run_case(
        self, case: Case, args: Any, kwargs: Any, settings: Mapping[str, Any], limit: float
    ) -> list[Outcome]:
        return self._pool.run_case(self._call(case, args, kwargs, settings=settings), limit)

    def run_bare(self, case: Case, *args: Any, limit: float = 120.0, **kwargs: Any) -> list[Any]:
        """Run a case over the processes' transport."""
        call = self._call(case, args, kwargs, bare=True)
        return returned_values(self._pool.run_case(call, limit))

    def _call(self, case: Case, args: Any, kwargs: Any, **options: Any) -> RankFunctionCall:
        name, path = RankFunctionCall.name_of(case), tuple(sys.path)
        return RankFunctionCall(name, args, kwargs, self.transport, path=path, **options)

    def close(self) -> None:
        """Terminate the processes."""
        self._pool.close()


def world_of(transport: str, size: int) -> World:
    """Create the ranks for a transport: threads for ``"loopback"``, otherwise processes."""
    return LoopbackWorld(size) if transport == "loopback" else PoolWorld(transport, size)
