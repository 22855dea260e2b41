"""Decorator ``ranks``, which runs a pytest test on several ranks."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package
from asyncddp.testing.outcome import Outcome, returned_values
from asyncddp.testing.rank_function_call import RANK_FUNCTION
from asyncddp.testing.worlds import World, world_of
from asyncddp.transport import TRANSPORTS

if TYPE_CHECKING:
    import pytest

_WORLD = "ranks_world"
_opened: WeakKeyDictionary[pytest.Config, dict[tuple[str, int], World]] = WeakKeyDictionary()


def ranks(
    *sizes: int, transports: str | Sequence[str] = "loopback", limit: float = 120.0, **settings: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test on several ranks: call it on each, and fail if it fails on any.

    Example: see :mod:`asyncddp.testing`.

    Each test gets a world of its own, with timeouts of 90 seconds, so that what would hang fails.
    Fixtures and parameters are handed to every rank. ``"loopback"`` runs the ranks as threads of
    pytest's process: nothing needs to be installed, and the code paths are those of processes, but
    what belongs to a process is shared, such as torch's random generator. Other transports run them
    as processes under ``mpirun``, which stay up from test to test; the function must then stand at
    the top of its module, and pickle must be able to carry the fixtures.

    Args:
        *sizes: Numbers of ranks; the test runs once with each.
        transports: One or several of ``"loopback"``, ``"mpi"``, ``"shared_memory"``
            and ``"c10d"``.
        limit: Seconds after which ranks that are processes count as hanging.
        **settings: Fields of :class:`asyncddp.config.Config`, such as ``timeout``.

    Returns:
        A decorator, which goes below other marks.

    Raises:
        ArgumentError: Numbers or transports that cannot be.
        EnvironmentProblem: pytest is not installed.
    """
    pytest = _pytest()
    transports = (transports,) if isinstance(transports, str) else tuple(transports)
    _check(sizes, transports)
    chosen = list(itertools.product(transports, sizes))
    names = [f"{transport}-{size}" for transport, size in chosen]

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        takes_request = "request" in inspect.signature(function).parameters

        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            which = kwargs.pop(_WORLD)
            request = kwargs["request"] if takes_request else kwargs.pop("request")
            world = _world(request.config, *which)
            case = function if world.transport == "loopback" else test
            _raise_failures(world.outcomes(case, *args, settings=settings, limit=limit, **kwargs))

        del test.__wrapped__  # pytest would look at its parameters
        setattr(test, RANK_FUNCTION, function)
        test.__signature__ = _with_world(function)  # type: ignore[attr-defined]
        marked: Callable[..., None] = pytest.mark.parametrize(_WORLD, chosen, ids=names)(test)
        return marked

    return decorate


def _pytest() -> Any:
    with needed_package("asyncddp.testing.ranks needs pytest", "testing"):
        import pytest
    return pytest


def _check(sizes: Sequence[int], transports: Sequence[str]) -> None:
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ArgumentError(
            f"ranks: arguments sizes: expected numbers of ranks, such as ranks(2, 4), got {sizes!r}"
        )
    for unknown in [name for name in transports or [""] if name not in TRANSPORTS]:
        known = ", ".join(TRANSPORTS)
        raise ArgumentError(
            f"ranks: argument transports: expected some of {known}, got {unknown!r}"
        )


def _with_world(function: Callable[..., Any]) -> inspect.Signature:
    """Add the decorator's own fixtures to a function's signature."""
    own = inspect.signature(function)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in ("request", _WORLD)
        if name not in own.parameters
    ]
    return own.replace(parameters=[*own.parameters.values(), *extra])


def _world(config: pytest.Config, transport: str, size: int) -> World:
    """Return the world of ranks of a transport, started once per pytest session."""
    opened = _opened.setdefault(config, {})
    if (transport, size) not in opened:
        opened[transport, size] = world = world_of(transport, size)
        config.add_cleanup(world.close)
    return opened[transport, size]


def _raise_failures(outcomes: Sequence[Outcome]) -> None:
    """Fail if a rank has failed; skip if all have skipped."""
    if all("Skipped" in outcome.bases for outcome in outcomes):
        _pytest().skip(outcomes[0].message)
    returned_values(outcomes)
