"""``lightning``: batches per second of a Trainer by each strategy, alone and beside a late rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median

from benchmarks.ranks import Advance, run_on_ranks
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureRow, FigureTable

DDP = "Lightning's ddp, gloo"
_ASYNCHRONOUS = ("win_put", "push_sum", "async_model_average")
STRATEGIES = {
    DDP: "",
    "gradient_allreduce": "gradient_allreduce",
    "adapt_then_combine, one-peer": "adapt_then_combine",
    **{name: name for name in _ASYNCHRONOUS},
}
"""``{row: algorithm}``"""
_NOTE = (
    "Two ranks, a small convolutional network, a Trainer without logger and bar. Each round fits "
    "by each strategy twice: with equal ranks, and with rank 0 ten times as slow as a local step. "
    "Shown are the batches per second of rank 1, medians over rounds, and what the late rank "
    "leaves of them, the median of the rounds' ratios."
)
_LEFT = 0.8


def _lines(times: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[FigureRow]:
    """A line for every strategy, from a batch's seconds alone and beside a late rank."""
    ddp = median(alone for alone, _ in times[DDP])
    for name, rounds in times.items():
        alone, beside = (median(column) for column in zip(*rounds, strict=True))
        left = median(one / other for one, other in rounds)
        aim: tuple[str, bool] | tuple[()] = ()
        if name in _ASYNCHRONOUS:
            aim = "beside a late rank ≥ 80% of alone", left >= _LEFT
        elif name != DDP:
            aim = "alone ≥ 1 x Lightning's ddp", alone <= ddp
        yield FigureRow((name, 1 / alone, ddp / alone, 1 / beside, left), *aim)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows."""
    from benchmarks.plots import draw_bars

    rounds, batches = (1, 5) if options.quick else (options.rounds or 5, 20)
    given = {"rounds": rounds, "batches": batches, "small": options.quick}
    read = run_on_ranks(2, "lightning_rank:measure", given, advance, {"OMP_NUM_THREADS": "1"})
    lines = list(_lines(read["times"]))
    columns = ("strategy", "batches/s", "÷ ddp", "beside a late rank", "÷ alone")
    title = "a Trainer's batches per second, 2 ranks"
    table = FigureTable("lightning", title, columns, lines, _NOTE)
    alone, beside = ([float(line.cells[column]) for line in lines] for column in (1, 3))
    bars = {"equal ranks": (alone, "#0072B2"), "rank 0 ten times as slow": (beside, "#D55E00")}
    names, label = list(read["times"]), "batches per second of rank 1"
    draw = partial(draw_bars, names=names, series=bars, label=label, height=0.5)
    return BenchFigures(read["header"], [table], draw)
