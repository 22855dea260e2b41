"""``memory``: peak memory of a training step beyond model, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.memory.memory_table import MethodMemory, RankMemory, lines
from benchmarks.memory.training_methods import BY_MPI, LIMITS, LOCAL, METHODS
from benchmarks.standalone_command import BenchFigures, BenchOptions, command, finished
from benchmarks.subprocess_runs import on_this_machine, run_for_json
from benchmarks.unit_text import size_text

__all__ = ["main", "measure_method"]

_LAYERS, _WIDTH, _STEPS = 24, 1024, 6  # a model of 96 MB
_QUICK_WIDTH, _QUICK_METHODS = 512, (LOCAL, "one-peer AWC")
_NOTE = (
    "Each method in two fresh processes, after two of its steps on a tiny net that load its "
    "libraries; SGD with momentum. A rank's peak is the most of its own memory in any step, from "
    "Linux's account (VmHWM) without mapped files; memory that n processes share counts to the "
    "n-th part for each. Three models are subtracted: parameters, gradients, momentum. The fuller "
    "of the two ranks is shown. A local step, without other ranks, takes memory of torch's own, "
    "which is subtracted in the column that is judged; it differs from run to run by 5 to 15 MB."
)


def measure_method(method: str, width: int, steps: int) -> MethodMemory:
    """Measure one method in a fresh pair of processes."""
    given = {"layers": _LAYERS, "width": width, "steps": steps, "method": method}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    environ = {"ASYNCDDP_TRANSPORT": "mpi"} if method in BY_MPI else {}
    read = run_for_json(on_this_machine(2, "memory.memory_rank", *words), environ=environ)
    return MethodMemory(method, [RankMemory(**one) for one in read["ranks"]], read["header"])


def draw(path: Path, held: Sequence[MethodMemory]) -> None:
    """Draw a bar for every method.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, 0.5 + 0.35 * len(held)), layout="constrained")
        axes = figure.subplots()
        colors = ["#D55E00" if one.method in LIMITS else "#0072B2" for one in held]
        axes.barh([one.method for one in held], [one.models for one in held], color=colors)
        axes.invert_yaxis()
        axes.set_xlabel("peak beyond model, gradients and optimizer, in model sizes")
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.savefig(path, dpi=150, bbox_inches="tight")


def figures(options: BenchOptions, advance: Callable[[str], None]) -> BenchFigures:
    """Everything that this bench shows."""
    width = _QUICK_WIDTH if options.quick else _WIDTH
    tried = []
    for method in _QUICK_METHODS if options.quick else METHODS:
        advance(method)
        tried.append(measure_method(method, width, options.rounds or _STEPS))
    held = [one for one in tried if not one.why]
    size = size_text(_LAYERS * width**2 * 4)
    figure_table = finished(
        "memory",
        f"peak beyond model, gradients and optimizer state, model of {size}, 2 ranks",
        ("method", "peak", "÷ model", "but for a local step's", "parameters in"),
        list(lines(held)),
        _NOTE,
    )
    missing = [f"{one.method} was not measured: {one.why}" for one in tried if one.why]
    return BenchFigures(
        tried[0].facts, [figure_table], lambda path: draw(path, held), missing=missing
    )


main = command("memory", figures)

if __name__ == "__main__":
    main()
