"""Least squares LS(n): how far from the optimum each method ends, on each graph that it admits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from asyncddp import simulate, topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.methods.contender import Contender, every_method
from benchmarks.methods.grid import Grid, Values
from benchmarks.ranks import Advance

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


def _error(
    one: Contender, problem: simulate.Problem, graph: GraphOrSchedule | None, lr: float, steps: int
) -> float | None:
    """Return the error in the end, of an exact method after more steps if it needs them."""
    for more in (steps, _ENOUGH) if one.exact else (steps,):
        run = one.train(problem, lr, graph, steps=more)
        if run is None or run.error[-1] <= EXACT:
            break
    return None if run is None else float(run.error[-1])


def errors_on_graphs(
    key: str,
    problems: Sequence[simulate.Problem],
    contenders: Sequence[Contender],
    chosen: Mapping[str, GraphOrSchedule],
    lr: Callable[[Contender], float],
    steps: tuple[int, int],
    advance: Advance,
    note: str,
) -> Grid:
    """Compare the methods' errors in the end; those that say they are exact are held to it.

    Args:
        key: Of the grid.
        problems: One for each seed.
        contenders: The methods.
        chosen: Graphs, for methods that ask for one.
        lr: Step size of a method.
        steps: Of an exact method, and of one with a bias.
        advance: Told each method and graph.
        note: Of the grid.
    """
    values: dict[tuple[str, str], Values] = {}
    aims: dict[str, tuple[str, bool]] = {}
    for one in contenders:
        of_all = {_ALL_RANKS: None} if one.by_all_ranks else chosen
        for name, graph in of_all.items():
            advance(f"{problems[0].name}: {one.title}, {name}")
            count = steps[0] if one.exact else steps[1]
            tried = [_error(one, problem, graph, lr(one), count) for problem in problems]
            errors = tuple(error for error in tried if error is not None)
            if errors:
                values[one.title, name] = errors
                _, before = aims.get(one.title, ("", True))
                if one.exact:
                    aims[one.title] = (f"≤ {EXACT:g}", before and max(errors) <= EXACT)
    return Grid(
        key,
        problems[0].name,
        list(dict.fromkeys(title for title, _ in values)),
        [*chosen, *([_ALL_RANKS] if any(one.by_all_ranks for one in contenders) else [])],
        values,
        error_text,
        "error after the last step",
        log=True,
        aims=aims,
        note=note,
    )


def _grid(ranks: int, quick: bool, advance: Advance) -> Grid:
    every = [one for one in every_method() if not quick or one.title in _QUICK]
    chosen = dict(list(graphs(ranks).items())[: 2 if quick else None])
    problem, steps = simulate.least_squares(ranks), (_STEPS, _SETTLED)
    key = f"least_squares_{ranks}"
    grid = errors_on_graphs(key, [problem], every, chosen, lambda one: _LR, steps, advance, _NOTE)
    published = {
        title: (f"ring: {error:.4e}", abs(grid.values[title, "ring"][0] / error - 1) < 5e-4)
        for title, error in (_PUBLISHED.items() if ranks == 8 else ())
    }
    title = f"least squares, {ranks} ranks"
    return replace(grid, title=title, aims={**grid.aims, **published})


def grids(quick: bool, advance: Advance) -> list[Grid]:
    """Compare on 8 and 16 ranks."""
    return [_grid(ranks, quick, advance) for ranks in ((8,) if quick else (8, 16))]
