"""Tests that run on each rank, and tests that loop over cases instead of being one test for each.

A test for each of hundreds of cases pays for its fixtures, its name and, where ranks are processes,
a way there and back. So a test may take its cases in a loop, and list those that failed::

    @on("loopback-4", "mpi-2")
    @on_each_rank
    @each("dtype", DTYPES)
    def test_the_sum_has_the_dtype_of_its_terms(dtype):
        '''The law, which each rank checks for itself.'''
        assert bf.allreduce(torch.ones(2, dtype=dtype)).dtype == dtype
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from asyncddp.testing.rank_function_call import RANK_FUNCTION
from tests.support.worlds import LoopbackWorld, World

__all__ = ["each", "on_each_rank"]

_FAILURES = (AssertionError, pytest.fail.Exception)


def on_each_rank(
    test: Callable[..., None] | None = None, *, ranks: int | None = None, **options: Any
) -> Any:
    """Let a test call its function on every rank of ``world``, which it takes beside its arguments.

    Args:
        test: The function, at the top of its module, so that processes can import it.
        ranks: So many threads in place of a ``world``.
        **options: What :meth:`asyncddp.testing.worlds.World.run` takes, such as ``settings``.
    """
    if test is None:
        return functools.partial(on_each_rank, ranks=ranks, **options)

    @functools.wraps(test)
    def run(world: World | None = None, **given: Any) -> None:
        chosen = LoopbackWorld(ranks) if ranks is not None else world
        chosen.run(test if chosen.transport == "loopback" else run, **given, **options)

    own = _signature(run, test)
    more = [] if ranks is not None else [inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)]
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])
    setattr(run, RANK_FUNCTION, test)
    return run


def each(
    names: str | Sequence[str], cases: Collection[Any], ids: Any = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test's function for each case in turn; all assertions that failed are listed.

    Args:
        names: As ``pytest.mark.parametrize`` takes them.
        cases: A value for each case; of several names a tuple of values.
        ids: A name for each case, or a function that gives one; else what the case prints as.
    """
    several = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    cases = list(cases)
    labels = [str(case) for case in cases]
    if ids is not None:
        labels = [ids(case) for case in cases] if callable(ids) else [*ids]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(*args: Any, **given: Any) -> None:
            failed: dict[str, BaseException] = {}
            for label, case in zip(labels, cases, strict=True):
                values = (case,) if len(several) == 1 else case
                try:
                    test(*args, **given, **dict(zip(several, values, strict=True)))
                except _FAILURES as failure:
                    failed[label] = failure
                except Exception as error:
                    raise AssertionError(f"{', '.join(several)} = {label}") from error
            if failed:
                told = "\n".join(f"{label}: {failure}" for label, failure in failed.items())
                first = next(iter(failed.values()))
                raise AssertionError(
                    f"{len(failed)} of {len(cases)} cases of {', '.join(several)} failed:\n{told}"
                ) from first

        own = _signature(loop, test)
        left = [one for name, one in own.parameters.items() if name not in several]
        loop.__signature__ = own.replace(parameters=left)  # type: ignore[attr-defined]
        return loop

    return decorate


def _signature(wrapper: Any, test: Callable[..., None]) -> inspect.Signature:
    """A test's signature, to be changed; pytest would follow the wrapper to it."""
    del wrapper.__wrapped__
    return inspect.signature(test)
