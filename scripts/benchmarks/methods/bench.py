"""``methods``: each method held to its theory and to published figures, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.machine_info import machine_facts
from benchmarks.methods import churn, digits, least_squares, logistic, relayed_sums
from benchmarks.methods.grid import Grid
from benchmarks.methods.grid_plot import draw
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions

_PROBLEMS: Mapping[str, Callable[[bool, Advance], list[Grid]]] = {
    "least-squares": least_squares.grids,
    "logistic": logistic.grids,
    "quadratics": relayed_sums.grids,
    "digits": digits.grids,
    "churn": churn.grids,
}


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows."""
    facts, threads = machine_facts(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {name: grids(options.quick, advance) for name, grids in _PROBLEMS.items()}
    finally:
        torch.set_num_threads(threads)
    tables = [grid.table() for grids in found.values() for grid in grids]
    return BenchFigures(facts, tables, lambda path: _draw(path, found))


def _draw(path: Path, found: Mapping[str, Sequence[Grid]]) -> None:
    """Draw a picture for each problem: FILE-PROBLEM.png."""
    for name, grids in found.items():
        draw(path.with_name(f"{path.stem}-{name}{path.suffix}"), grids)
