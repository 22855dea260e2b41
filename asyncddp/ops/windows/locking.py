"""``win_mutex``, for exclusive access to a window's buffers, and checks of window arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.weighted_average import require_finite
from asyncddp.windows import Window, windows_of


@contextmanager
def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None
) -> Iterator[None]:
    """Hold the mutex of a window's buffers inside the ``with`` block.

    Single values are published and read whole without a mutex. The mutex serves sequences of verbs:
    a writer that holds a neighbour's mutex keeps that neighbour from updating with
    ``require_mutex``; a rank that holds its own mutex keeps its neighbours from writing with
    ``require_mutex``. Two writers do not exclude each other. A thread that holds the mutex may take
    it again; other threads of the rank wait.

    Args:
        name: The window.
        for_self: Hold this rank's own buffers; those at other ranks otherwise.
        ranks: The neighbours concerned; all out-neighbours, or all in-neighbours for ``for_self``.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: A rank that is no such neighbour.
        PeerLeftError: A rank that holds it has ended.
        WaitTimeoutError: The deadline has passed.

    Example:
        >>> import asyncddp as bf, torch
        >>> def alone():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     with bf.win_mutex("x"):
        ...         bf.win_put(x, "x")
        ...     bf.barrier()
        ...     return bf.win_update("x", require_mutex=True).item()
        >>> with bf.local_world(2) as world:
        ...     world.run(alone)
        [0.5, 0.5]
    """
    window = windows_of(current()).find("win_mutex", name)
    known: Iterable[int] = window.edges.incoming if for_self else window.edges.outgoing
    what = "an in-neighbour" if for_self else "an out-neighbour"
    chosen = known if ranks is None else weights_by_rank("win_mutex", "ranks", ranks, known, what)
    with window.mutex.holding(() if for_self else chosen, chosen if for_self else ()):
        yield


def weights_by_rank(
    verb: str,
    argument: str,
    given: Mapping[int, float] | Iterable[int],
    known: Iterable[int],
    what: str,
) -> dict[int, float]:
    """Check weights of neighbours, and return them by rank; a list of ranks means weights of 1."""
    if not isinstance(given, Iterable):
        raise ArgumentError(
            f"{verb}: argument {argument}: expected ranks, or a mapping {{rank: weight}}, got "
            f"{type(given).__name__}"
        )
    ranks, here = list(given), set(known)
    strangers = [rank for rank in ranks if rank not in here]
    if strangers:
        raise ArgumentError(
            f"{verb}: argument {argument}: rank {strangers[0]} is not {what} of this rank in the "
            f"window; those are {sorted(here)}"
        )
    if len(set(ranks)) != len(ranks):
        raise ArgumentError(f"{verb}: argument {argument}: expected each rank once, got {ranks}")
    weights = given if isinstance(given, Mapping) else dict.fromkeys(ranks, 1.0)
    return {
        int(rank): require_finite(verb, f"{argument}[{rank}]", weight)
        for rank, weight in weights.items()
    }


def require_integer_weights(verb: str, window: Window, weights: Iterable[float]) -> None:
    """Raise ArgumentError unless all weights are whole numbers, for a window of integers."""
    broken = [weight for weight in weights if weight != int(weight)]
    if broken:
        raise ArgumentError(
            f"{verb}: {broken[0]:g} times a value of {window.dtype} is no {window.dtype}; give "
            "whole weights, or make the window of floats"
        )
