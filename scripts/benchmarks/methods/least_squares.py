"""Least squares LS(n): how far from the optimum each method ends, on each graph that it admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncddp import simulate, topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.methods.contender import Contender, every_method
from benchmarks.methods.grid import Grid, Values

__all__ = ["EXACT", "compare_on_graphs", "error_text", "grids"]

EXACT = 1e-11
"""Error of a method without bias, at most."""
_ALL_RANKS = "all ranks"
_LR, _STEPS = 0.05, 1000
_ENOUGH = 10_000  # steps where an exact method has not yet arrived
_SETTLED = 500  # steps after which a bias has its digits
_PUBLISHED = {"adapt_then_combine": 5.5332e-2, "adapt_with_combine": 7.7835e-2}
_QUICK = ("adapt_then_combine", "adapt_with_combine", "gradient_tracking", "d2")
_NOTE = (
    f"Whole batches in float64, {_STEPS} steps of {_LR} from 0, {_ENOUGH} where an exact method "
    f"needs them, {_SETTLED} where there is a bias; seed 0. '{_ALL_RANKS}': methods that ask for "
    "no graph; '-': refused. Errors are ||X - 1 x*'|| / (sqrt(n) ||x*||)."
)


def graphs(ranks: int) -> dict[str, GraphOrSchedule]:
    """Return the graphs and schedules on which methods are compared."""
    return {
        "ring": topology.ring(ranks),
        "lazy exponential": topology.lazy_weights(topology.symmetric_exponential(ranks)),
        "exponential": topology.exponential_two(ranks),
        "one-peer exponential": topology.one_peer_exponential(ranks),
    }


def error_text(values: Values) -> str:
    """Tell an error by five digits, and one that is rounding alone by its order."""
    mean = sum(values) / len(values)
    text = f"{mean:.4e}" if mean > EXACT else f"{mean:.0e}"
    return text if len(values) == 1 else f"{mean:.3g} ± {(max(values) - min(values)) / 2:.1g}"


def compare_on_graphs(
    problems: Sequence[simulate.Problem],
    contenders: Sequence[Contender],
    chosen: dict[str, GraphOrSchedule],
    lr: Callable[[Contender], float],
    steps: Callable[[Contender], int],
    advance: Callable[[str], None],
) -> dict[tuple[str, str], Values]:
    """Return each method's errors in the end, one for each problem, by method and graph."""
    found: dict[tuple[str, str], Values] = {}
    for one in contenders:
        graphs_of = {_ALL_RANKS: None} if one.by_all_ranks else chosen
        for name, graph in graphs_of.items():
            advance(f"{problems[0].name}: {one.title}, {name}")
            tried = [_error(one, problem, graph, lr(one), steps(one)) for problem in problems]
            errors = tuple(error for error in tried if error is not None)
            if errors:
                found[one.title, name] = errors
    return found


def _error(
    one: Contender,
    problem: simulate.Problem,
    graph: GraphOrSchedule | None,
    lr: float,
    steps: int,
) -> float | None:
    """Return the error in the end, of an exact method after more steps if it needs them."""
    for more in (steps, _ENOUGH) if one.exact else (steps,):
        run = one.train(problem, lr, graph, steps=more)
        if run is None or run.error[-1] <= EXACT:
            break
    return None if run is None else float(run.error[-1])


def _grid(ranks: int, quick: bool, advance: Callable[[str], None]) -> Grid:
    every = [one for one in every_method() if not quick or one.title in _QUICK]
    chosen = dict(list(graphs(ranks).items())[: 2 if quick else None])
    values = compare_on_graphs(
        [simulate.least_squares(ranks)],
        every,
        chosen,
        lambda one: _LR,
        lambda one: _STEPS if one.exact else _SETTLED,
        advance,
    )
    aims = exact_aims(every, values)
    for title, error in _PUBLISHED.items() if ranks == 8 else ():
        close = abs(values[title, "ring"][0] / error - 1) < 5e-4
        aims[title] = (f"ring: {error:.4e}", close)
    rows = [one.title for one in every if any(title == one.title for title, _ in values)]
    return Grid(
        f"least_squares_{ranks}",
        f"least squares, {ranks} ranks",
        rows,
        [*chosen, *([_ALL_RANKS] if any(one.by_all_ranks for one in every) else [])],
        values,
        error_text,
        "error after the last step",
        log=True,
        aims=aims,
        note=_NOTE,
    )


def exact_aims(
    contenders: Sequence[Contender], values: dict[tuple[str, str], Values]
) -> dict[str, tuple[str, bool]]:
    """Judge the methods that say they are exact by their largest error on any graph."""
    worst = {
        one.title: max(max(found) for (title, _), found in values.items() if title == one.title)
        for one in contenders
        if one.exact and any(title == one.title for title, _ in values)
    }
    return {title: (f"≤ {EXACT:g}", error <= EXACT) for title, error in worst.items()}


def grids(quick: bool, advance: Callable[[str], None]) -> list[Grid]:
    """Compare on 8 and 16 ranks."""
    return [_grid(ranks, quick, advance) for ranks in ((8,) if quick else (8, 16))]
