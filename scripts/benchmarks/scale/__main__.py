"""``scale``: messages of 2 … 64 ranks, a model up to 100,000, seconds of many ranks here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import asyncddp as bf
from benchmarks.scale.local_world_seconds import (
    LocalWorldSeconds,
    local_world_lines,
    measure_local_world,
)
from benchmarks.scale.message_counters import MONITORING
from benchmarks.scale.oversubscribed_seconds import (
    OversubscribedSeconds,
    measure_oversubscribed,
    oversubscribed_lines,
)
from benchmarks.scale.scale_plot import draw
from benchmarks.scale.scale_tables import (
    WorldCounts,
    compute_model_costs,
    counted_lines,
)
from benchmarks.scale.verb_counts import count_verbs
from benchmarks.standalone_command import BenchFigures, BenchOptions, command, finished
from benchmarks.subprocess_runs import on_this_machine, run_for_json

__all__ = ["in_processes", "in_threads", "main"]

_TENSOR = 1 << 20  # bytes
_CALLS = 6
_PROCESSES, _THREADS = (2, 4, 8, 16), (32, 64)
_LOCAL_WORLDS, _REPEATS = (16, 64, 256, 1024), 3
_OVERSUBSCRIBED, _RUNS, _ROUNDS, _QUICK_ROUNDS = 24, 3, 10, 2
_MODEL = (2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16384, 100_000)
_COUNTED = (
    "Processes: counted inside Open MPI, every message between ranks, also those of its "
    "collectives; ranks use MPI alone, as between machines. Threads: counted at the library's "
    "transport, where allreduce sends nothing but headers and is left out. The model is that of "
    "topology.communication_cost, of the ring for allreduce; MPI may choose another way."
)
_COLUMNS = ("ranks", "verb", "messages", "of them headers", "bytes", "÷ tensor")
_BESIDE = ("model: messages", "model: bytes ÷ tensor")
_TIMED = "4 KB of float32 on each rank; median, least and most of the repeats."
_SHARED_CORES = (
    "More ranks than cores, each a process; MPI yields the core where it waits, as ours does. 4 KB "
    "of float32; medians of the rounds of some runs, each of which starts once, when all its ranks "
    "have loaded torch and mpi4py. mpi4py works in memory that was there before, as in the tables "
    "of ops; on arrays, without torch; in a function, which asks whether a tensor can be sent, and "
    "makes what it returns."
)
_OVERSUBSCRIBED_COLUMNS = (
    *("ranks", "work", "asyncddp", "mpi4py", "on arrays", "in a function", "÷ mpi4py"),
)


def in_processes(ranks: int, nbytes: int, calls: int) -> WorldCounts:
    """Count under ``asyncddp run``."""
    given = ("--nbytes", str(nbytes), "--calls", str(calls))
    read = run_for_json(on_this_machine(ranks, "scale.scale_rank", *given), environ=MONITORING)
    place = "processes"
    return WorldCounts(ranks, place, nbytes, calls, read["ranks"], read["why"], read["header"])


def in_threads(ranks: int, nbytes: int, calls: int) -> WorldCounts:
    """Count in a local world."""
    with bf.local_world(ranks) as world:
        found = world.run(count_verbs, nbytes, calls)
    return WorldCounts(ranks, "threads", nbytes, calls, found)


def _measured(options: BenchOptions, advance: Callable[[str], None]) -> Iterator[WorldCounts]:
    """Count at every number of ranks."""
    calls = options.rounds or _CALLS
    for ranks in (2,) if options.quick else _PROCESSES:
        advance(f"{ranks} processes")
        yield in_processes(ranks, _TENSOR, calls)
    for ranks in (8,) if options.quick else _THREADS:
        advance(f"{ranks} threads")
        yield in_threads(ranks, _TENSOR, calls)


def _local_worlds(
    options: BenchOptions, advance: Callable[[str], None]
) -> Iterator[LocalWorldSeconds]:
    for ranks in (8,) if options.quick else _LOCAL_WORLDS:
        advance(f"seconds of {ranks} threads")
        yield measure_local_world(ranks, 1 if options.quick else _REPEATS)


def _oversubscribed(options: BenchOptions, advance: Callable[[str], None]) -> OversubscribedSeconds:
    ranks = 4 if options.quick else _OVERSUBSCRIBED
    advance(f"seconds of {ranks} processes")
    runs, rounds = (1, _QUICK_ROUNDS) if options.quick else (_RUNS, options.rounds or _ROUNDS)
    return measure_oversubscribed(ranks, runs, rounds)


def figures(options: BenchOptions, advance: Callable[[str], None]) -> BenchFigures:
    """Everything that this bench shows."""
    worlds = list(_measured(options, advance))
    model = compute_model_costs(_MODEL[:6] if options.quick else _MODEL, _TENSOR, advance)
    figure_tables = (
        finished(
            "scale",
            "what the busiest rank sends for one call, tensor of 1 MB",
            (*_COLUMNS, *_BESIDE),
            [line for world in worlds for line in counted_lines(world)],
            _COUNTED,
        ),
        finished(
            "scale_local_world",
            "seconds of a local world: ranks are threads of one process",
            ("ranks", "work", "median", "least", "most", "µs per rank and call", "bare threads"),
            list(local_world_lines(list(_local_worlds(options, advance)))),
            _TIMED,
        ),
        finished(
            "scale_oversubscribed",
            "seconds of more ranks than cores",
            _OVERSUBSCRIBED_COLUMNS,
            list(oversubscribed_lines(_oversubscribed(options, advance))),
            _SHARED_CORES,
        ),
    )
    missing = [f"allreduce of {one.ranks} {one.started}: {one.why}" for one in worlds if one.why]
    facts = next(one.facts for one in worlds if one.facts)
    return BenchFigures(
        facts, figure_tables, lambda path: draw(path, worlds, model, _TENSOR), missing=missing
    )


main = command("scale", figures)

if __name__ == "__main__":
    main()
