"""``lightning``: batches per second of a Trainer by each strategy, alone and beside a late rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.lightning.strategies import ASYNCHRONOUS, DDP
from benchmarks.standalone_command import BenchFigures, BenchOptions, command, finished
from benchmarks.subprocess_runs import on_this_machine, run_for_json
from benchmarks.tables import FigureRow

__all__ = ["lines", "main"]

_NOTE = (
    "Two ranks, a small convolutional network, a Trainer without logger and bar. Each round fits "
    "by each strategy twice: with equal ranks, and with rank 0 ten times as slow as a local step. "
    "Shown are the batches per second of rank 1, medians over rounds, and what the late rank "
    "leaves of them, the median of the rounds' ratios."
)
_LEFT = 0.8


def lines(times: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[FigureRow]:
    """A line for every strategy, from a batch's seconds alone and beside a late rank."""
    ddp = median(alone for alone, _ in times[DDP])
    for name, rounds in times.items():
        alone, beside = (median(column) for column in zip(*rounds, strict=True))
        left = median(one / other for one, other in rounds)
        cells = (name, 1 / alone, ddp / alone, 1 / beside, left)
        if name in ASYNCHRONOUS:
            yield FigureRow(cells, "beside a late rank ≥ 80% of alone", left >= _LEFT)
        elif name == DDP:
            yield FigureRow(cells)
        else:
            yield FigureRow(cells, "alone ≥ 1 x Lightning's ddp", alone <= ddp)


def draw(path: Path, rows: Sequence[FigureRow]) -> None:
    """Draw two bars for every strategy.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, 0.8 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for offset, column, color, label in (
            (-0.2, 1, "#0072B2", "equal ranks"),
            (0.2, 3, "#D55E00", "rank 0 ten times as slow"),
        ):
            places = [place + offset for place in range(len(rows))]
            axes.barh(places, [row.cells[column] for row in rows], 0.4, color=color, label=label)
        axes.set_yticks(range(len(rows)), [str(row.cells[0]) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("batches per second of rank 1")
        axes.legend(frameon=False)
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.savefig(path, dpi=150, bbox_inches="tight")


def figures(options: BenchOptions, advance: Callable[[str], None]) -> BenchFigures:
    """Everything that this bench shows."""
    rounds, batches = (1, 5) if options.quick else (options.rounds or 5, 20)
    words = ["--rounds", str(rounds), "--batches", str(batches)] + ["--small"] * options.quick
    launch = on_this_machine(2, "lightning.lightning_rank", *words)
    read = run_for_json(launch, advance, {"OMP_NUM_THREADS": "1"})
    rows = list(lines(read["times"]))
    columns = ("strategy", "batches/s", "÷ ddp", "beside a late rank", "÷ alone")
    table = finished("lightning", "a Trainer's batches per second, 2 ranks", columns, rows, _NOTE)
    return BenchFigures(read["header"], [table], lambda path: draw(path, rows))


main = command("lightning", figures)

if __name__ == "__main__":
    main()
