"""``memory``: peak memory of a training step beyond model, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

import asyncddp as bf
from asyncddp import topology
from benchmarks.process_memory import MemoryUnknownError, Steps, in_shared_memory, peak_of
from benchmarks.ranks import Advance, run_on_ranks
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureRow, FigureTable, RankGroup, size_text
from benchmarks.training_models import squares
from benchmarks.training_step import TrainingSetup, ddp, make_training, ours

_LAYERS, _WIDTH, _STEPS = 24, 1024, 6  # a model of 96 MB
_TINY = (2, 64)  # layers and width
_LIMIT = 0.25  # most memory that is aimed at beyond a local step's, in models
_NOTE = (
    "Each method in two fresh processes, after two of its steps on a tiny net that load its "
    "libraries; SGD with momentum. A rank's peak is the most of its own memory in any step, from "
    "Linux's account (VmHWM) without mapped files; memory that n processes share counts to the "
    "n-th part for each. Three models are subtracted: parameters, gradients, momentum. The fuller "
    "of the two ranks is shown. A local step, without other ranks, takes memory of torch's own, "
    "which is subtracted in the column that is judged; it differs from run to run by 5 to 15 MB."
)


_AWC, _ATC = "adapt_with_combine", "adapt_then_combine"
_LOCAL, _ONE_PEER, _BY_MPI, _GLOO = "local step", "one-peer AWC", " by MPI", "DDP gloo"
_SMALL = {"communication_buffer_in_mb": 8.0}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    _LOCAL: ("", {}),
    _ONE_PEER: (_AWC, {}),
    "one-peer ATC": (_ATC, {}),
    "one-peer ATC in backward": (_ATC, {"update_in_backward": True}),
    # in which ranks of one machine exchange messages, as between machines
    f"one-peer AWC{_BY_MPI}": (_AWC, {}),
    f"one-peer ATC{_BY_MPI}": (_ATC, {}),
    f"one-peer AWC{_BY_MPI}, buffer of 8 MiB": (_AWC, _SMALL),
    f"one-peer ATC{_BY_MPI}, buffer of 8 MiB": (_ATC, _SMALL),
    "gradient_allreduce": ("gradient_allreduce", {}),
    _GLOO: (_GLOO, {}),
    f"{_GLOO}, gradient_as_bucket_view": (_GLOO, {"gradient_as_bucket_view": True}),
}
"""Algorithm and options, of the optimizer or of DistributedDataParallel."""


def _judged(method: str) -> bool:
    return method.startswith("one-peer") and not method.endswith(_BY_MPI)


def _training(world: RankGroup, method: str, layers: int, width: int) -> TrainingSetup:
    """Make a model with SGD and momentum, whose state is one more model."""
    momentum = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    made = make_training(world, squares(layers, width, momentum))
    algorithm, options = METHODS[method]
    if algorithm == _GLOO:
        ddp(made, world, **options)
    elif algorithm:
        one_peer = topology.one_peer_exponential(world.size)
        ours(made, algorithm, one_peer if algorithm in (_AWC, _ATC) else None, **options)
    return made


def _go(training: TrainingSetup, steps: int) -> None:
    for number in range(steps):
        training.step(number)


def measure_rank(method: str, width: int, steps: int) -> dict[str, Any]:
    """Measure a method on the ranks of this run: bytes beyond three models, or why not."""
    from benchmarks import baselines
    from benchmarks.machine_info import facts_of_run

    bf.init()
    world = baselines.join()
    found: dict[str, Any] = {"why": world.gloo if method.startswith(_GLOO) else None}
    made: list[TrainingSetup] = []

    def make() -> Steps:
        made.append(_training(world, method, _LAYERS, width))
        return partial(_go, made[0])

    if not found["why"]:
        _go(_training(world, method, *_TINY), 2)  # loads libraries
        try:
            found["beyond"] = peak_of(make, steps, bf.barrier) - 3 * _model_size(width)
            found["shared"] = in_shared_memory(next(made[0].model.parameters()))
        except MemoryUnknownError as reason:
            found["why"] = str(reason)
    return {"ranks": bf.allgather_object(found), "header": facts_of_run(world)}


def _model_size(width: int) -> int:
    return _LAYERS * width**2 * 4


def _lines(held: Mapping[str, list[dict[str, Any]]], model: int) -> Iterator[FigureRow]:
    """A line for every method, judged by what it takes beyond a local step."""
    peaks = {method: max(one["beyond"] for one in ranks) for method, ranks in held.items()}
    local = peaks.get(_LOCAL, 0) / model
    for method, ranks in held.items():
        place = "shared memory" if all(one["shared"] for one in ranks) else "own memory"
        models = peaks[method] / model
        cells = (method, size_text(peaks[method]), models, models - local, place)
        aim = (f"≤ {_LIMIT:g} models", models - local <= _LIMIT) if _judged(method) else ()
        yield FigureRow(cells, *aim)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows: each method in a fresh pair of processes."""
    from benchmarks.plots import draw_bars

    width = 512 if options.quick else _WIDTH
    held: dict[str, list[dict[str, Any]]] = {}
    missing: list[str] = []
    facts: dict[str, Any] = {}
    for method in (_LOCAL, _ONE_PEER) if options.quick else METHODS:
        advance(method)
        given = {"method": method, "width": width, "steps": options.rounds or _STEPS}
        environ = {"ASYNCDDP_TRANSPORT": "mpi"} if _BY_MPI in method else {}
        read = run_on_ranks(2, "memory:measure_rank", given, environ=environ)
        facts = facts or read["header"]
        why = next((one["why"] for one in read["ranks"] if one["why"]), None)
        if why:
            missing.append(f"{method} was not measured: {why}")
        else:
            held[method] = read["ranks"]
    model = _model_size(width)
    lines = list(_lines(held, model))
    columns = ("method", "peak", "÷ model", "but for a local step's", "parameters in")
    title = (
        f"peak beyond model, gradients and optimizer state, model of {size_text(model)}, 2 ranks"
    )
    table = FigureTable("memory", title, columns, lines, _NOTE)
    colors = ["#D55E00" if _judged(method) else "#0072B2" for method in held]
    bars = {"peak": ([float(line.cells[2]) for line in lines], colors)}
    label = "peak beyond model, gradients and optimizer, in model sizes"
    draw = partial(draw_bars, names=list(held), series=bars, label=label)
    return BenchFigures(facts, [table], draw, missing=missing)
