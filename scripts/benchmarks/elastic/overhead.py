"""Cost of elastic runs without faults: verbs and steps with it on and off, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import asyncddp as bf
from asyncddp.config import Config
from asyncddp.context.context import Context, activate
from asyncddp.transport.selection import open_transport
from benchmarks.elastic.rank_loops import GRADIENTS, TRAINING, WORKLOAD
from benchmarks.harness import measure
from benchmarks.machine_info import facts_of_run
from benchmarks.tables import (
    MB,
    Call,
    FigureRow,
    RankGroup,
    Rival,
    TimingRow,
    TimingTable,
    size_text,
    time_text,
)
from benchmarks.training_step import make_training, ours

_MPI, _OFF, _ON = "off, MPI and shared_memory", "off, c10d", "on, c10d"
_LIMIT = 1.02
COLUMNS = ("work", _MPI, _OFF, _ON, "on ÷ off, c10d")
TITLE = "elastic without a fault, beside not elastic"
NOTE = (
    "The three are worlds of the same processes, in turns. Elastic runs need c10d; the ratio is "
    "the median of the rounds' ratios, ± half the distance of their quartiles."
)

Verb = Callable[[torch.Tensor], torch.Tensor]


def _verb(verb: Verb, nbytes: int) -> Call:
    x = torch.ones(nbytes // 4)
    return lambda number: verb(x)


def _tables(world: RankGroup, contexts: dict[str, Context]) -> Iterator[TimingTable]:
    def inside(context: Context, make: Callable[[int], Call], nbytes: int) -> Call:
        activate(context)
        call = make(nbytes)

        def entered(number: int) -> Any:
            activate(context)
            return call(number)

        return entered

    def step(method: str, nbytes: int) -> Call:
        training = make_training(world, WORKLOAD)
        ours(training, method)
        return training.step

    def table(title: str, make: Callable[[int], Call], *sizes: int) -> TimingTable:
        rivals = [Rival(who, partial(inside, one, make)) for who, one in contexts.items()]
        return TimingTable(f"elastic_{title}", title, sizes, rivals, lead=1)

    one_peer = partial(bf.neighbor_allreduce, name="x")
    yield table(f"step, {TRAINING}", partial(step, TRAINING), WORKLOAD.nbytes)
    yield table(f"step, {GRADIENTS}", partial(step, GRADIENTS), WORKLOAD.nbytes)
    yield table("neighbor_allreduce", partial(_verb, one_peer), 4, MB)
    yield table("allreduce", partial(_verb, bf.allreduce), 4)


def measure_overhead(rounds: int, sample: float) -> dict[str, Any]:
    """Measure on the ranks of this run, whose current world is MPI's: rows and facts."""
    torch.set_num_threads(1)
    bf.init()
    from benchmarks import baselines  # here, since it joins MPI

    world = baselines.join()
    world.need_gloo()  # by whose store ranks meet
    contexts = {_MPI: bf.current()}
    for who in (_OFF, _ON):
        config = Config.from_environment(elastic=who == _ON)
        contexts[who] = Context(open_transport("c10d"), config)
    rows = [
        (row.table, row.rival, row.nbytes, row.calls, row.seconds)
        for table in _tables(world, contexts)
        for row in measure(world, table, rounds=rounds, sample=sample)[0]
    ]
    activate(contexts[_MPI])
    for who in (_OFF, _ON):
        contexts[who].close("it was measured")
    return {"rows": rows, "header": facts_of_run(world)}


def overhead_lines(rows: Sequence[TimingRow]) -> Iterator[FigureRow]:
    """A line for each work and size, judged by the ratio of the rounds."""
    found: dict[tuple[str, int], dict[str, TimingRow]] = {}
    for row in rows:
        found.setdefault((row.table, row.nbytes), {})[row.rival] = row
    for (table, nbytes), by in found.items():
        ratios = np.divide(by[_ON].seconds, by[_OFF].seconds)
        low, ratio, high = np.percentile(ratios, (25, 50, 75))
        told = [f"{time_text(by[who].median)} ±{by[who].spread:.0%}" for who in (_MPI, _OFF, _ON)]
        work = f"{table.removeprefix('elastic_')}, {size_text(nbytes)}"
        spread = f"{ratio:.3f} ±{(high - low) / 2:.3f}"
        yield FigureRow((work, *told, spread), f"≤ {_LIMIT:g} x off", bool(ratio <= _LIMIT))
