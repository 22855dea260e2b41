"""``scale``: messages of 2 … 64 ranks, a model up to 100,000, seconds of many ranks here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import asyncddp as bf
from asyncddp import topology
from benchmarks.ranks import Advance, run_on_ranks
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.scale.local_world_seconds import local_world_lines, measure_local_world
from benchmarks.scale.message_counts import (
    ALLREDUCE,
    GRAPHS,
    MONITORING,
    ONE_PEER,
    Found,
    count_verbs,
)
from benchmarks.tables import FigureRow, FigureTable, time_text

_TENSOR = 1 << 20  # bytes
_CALLS = 6
_PROCESSES, _THREADS = (2, 4, 8, 16), (32, 64)
_LOCAL_WORLDS, _REPEATS = (16, 64, 256, 1024), 3
_OVERSUBSCRIBED, _RUNS, _ROUNDS, _QUICK_ROUNDS = 24, 3, 10, 2
_AT_MOST = 2.0  # times mpi4py's
_MODEL = (2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16384, 100_000)
_COUNTED = (
    "Processes: counted inside Open MPI, every message between ranks, also those of its "
    "collectives; ranks use MPI alone, as between machines. Threads: counted at the library's "
    "transport, where allreduce sends nothing but headers and is left out. The model is that of "
    "topology.communication_cost, of the ring for allreduce; MPI may choose another way."
)
_COUNTED_COLUMNS = (
    *("ranks", "verb", "messages", "of them headers", "bytes", "÷ tensor"),
    *("model: messages", "model: bytes ÷ tensor"),
)
_TIMED = "4 KB of float32 on each rank; median, least and most of the repeats."
_TIMED_COLUMNS = (
    *("ranks", "work", "median", "least", "most", "µs per rank and call", "bare threads"),
)
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


@dataclass(frozen=True)
class WorldCounts:
    """Message counts of all ranks of one world.

    Attributes:
        ranks: How many there are.
        started: ``"processes"`` or ``"threads"``.
        nbytes: Size of the tensor.
        calls: Calls of each verb.
        found: For each rank and verb the counts of each counter.
        why: Why MPI has not counted, where it has not.
        facts: Machine and versions, where a run has told them.
    """

    ranks: int
    started: str
    nbytes: int
    calls: int
    found: Sequence[Found]
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def busiest(self, verb: str, counter: str, what: str) -> float | None:
        """The most that a rank sent for a call; None where that was not counted."""
        counts = [one[verb][counter] for one in self.found]
        return None if None in counts else max(count[what] for count in counts) / self.calls

    def sent(self, verb: str) -> tuple[float, float] | None:
        """Messages and bytes of the busiest rank, by the counter that sees all of them."""
        for counter in ("mpi", "transport") if verb in GRAPHS else ("mpi",):
            messages = self.busiest(verb, counter, "messages")
            nbytes = self.busiest(verb, counter, "nbytes")
            if messages is not None and nbytes is not None:
                return messages, nbytes
        return None

    def lines(self) -> Iterator[FigureRow]:
        """A line for every verb that was counted, beside its model."""
        tensor = self.nbytes
        for verb in (*GRAPHS, ALLREDUCE):
            sent = self.sent(verb)
            if sent is None:
                continue
            messages, nbytes = sent
            headers = self.busiest(verb, "transport", "headers") or 0.0
            graph = GRAPHS.get(verb, topology.ring)(self.ranks)
            costs = topology.communication_cost(graph, tensor)
            cost = costs.ring_allreduce if verb == ALLREDUCE else costs.neighbors
            cells = (f"{self.ranks} {self.started}", verb, messages, headers, f"{nbytes:,.0f}")
            compared = (nbytes / tensor, cost.messages_per_rank, cost.bytes_per_rank / tensor)
            met = nbytes <= 1.02 * tensor + 4096
            aim = ("≤ 1.02 tensors + 4 KB", met) if verb == ONE_PEER else ()
            yield FigureRow((*cells, *compared), *aim)


class ModelCosts(NamedTuple):
    """Modelled costs at one number of ranks, by averaging method."""

    ranks: int
    costs: Mapping[str, topology.Cost]


def in_processes(ranks: int, nbytes: int, calls: int) -> WorldCounts:
    """Count under ``asyncddp run``."""
    given = {"nbytes": nbytes, "calls": calls}
    read = run_on_ranks(ranks, "scale.message_counts:count_on_ranks", given, environ=MONITORING)
    found = (read["ranks"], read["why"], read["header"])
    return WorldCounts(ranks, "processes", nbytes, calls, *found)


def in_threads(ranks: int, nbytes: int, calls: int) -> WorldCounts:
    """Count in a local world."""
    with bf.local_world(ranks) as world:
        found = world.run(count_verbs, nbytes, calls)
    return WorldCounts(ranks, "threads", nbytes, calls, found)


def compute_model_costs(
    sizes: Sequence[int], nbytes: int, advance: Advance
) -> Sequence[ModelCosts]:
    """The model alone, also for numbers of ranks that no machine here has."""
    found = []
    for ranks in sizes:
        advance(f"model of {ranks} ranks")
        one_peer = topology.communication_cost(topology.one_peer_exponential(ranks), nbytes)
        exp2 = topology.communication_cost(topology.exponential_two(ranks), nbytes)
        costs = {
            "one-peer": one_peer.neighbors,
            "exp-2": exp2.neighbors,
            "ring allreduce": exp2.ring_allreduce,
            "tree allreduce": exp2.tree_allreduce,
        }
        found.append(ModelCosts(ranks, costs))
    return found


def _oversubscribed_lines(ranks: int, runs: int, rounds: int) -> Iterator[FigureRow]:
    """Start so many ranks some times: two lines for the start and one for each verb."""
    starts: list[Sequence[float]] = []
    calls: dict[str, dict[str, list[float]]] = {}
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            given = {"ranks": ranks, "rounds": rounds, "folder": folder}
            found = run_on_ranks(ranks, "scale.oversubscribed:measure_ranks", given)
        starts.append(found["start"])
        for verb, rival, seconds in found["rows"]:
            calls.setdefault(verb, {}).setdefault(rival, []).extend(seconds)
    mpi, load, init = (median(parts) for parts in zip(*starts, strict=True))
    times = {
        "MPI's start and init()": [mpi + init, mpi],
        "the same and loading asyncddp": [mpi + load + init, mpi],
        **{verb: [*map(median, rivals.values())] for verb, rivals in calls.items()},
    }
    for work, (ours, by_hand, *others) in times.items():
        told = [*map(time_text, (ours, by_hand, *others)), "", ""][:4]
        cells = (f"{ranks} processes", work, *told, ours / by_hand)
        yield FigureRow(cells, f"≤ {_AT_MOST:g} x mpi4py", ours <= _AT_MOST * by_hand)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows."""
    from benchmarks.scale.scale_plot import draw

    quick, calls = options.quick, options.rounds or _CALLS
    worlds = []
    for ranks in (2,) if quick else _PROCESSES:
        advance(f"{ranks} processes")
        worlds.append(in_processes(ranks, _TENSOR, calls))
    for ranks in (8,) if quick else _THREADS:
        advance(f"{ranks} threads")
        worlds.append(in_threads(ranks, _TENSOR, calls))
    model = compute_model_costs(_MODEL[:6] if quick else _MODEL, _TENSOR, advance)
    local_worlds = []
    for ranks in (8,) if quick else _LOCAL_WORLDS:
        advance(f"seconds of {ranks} threads")
        local_worlds.append(measure_local_world(ranks, 1 if quick else _REPEATS))
    ranks = 4 if quick else _OVERSUBSCRIBED
    advance(f"seconds of {ranks} processes")
    runs, rounds = (1, _QUICK_ROUNDS) if quick else (_RUNS, options.rounds or _ROUNDS)
    counted = [line for world in worlds for line in world.lines()]
    timed = list(local_world_lines(local_worlds))
    shared = list(_oversubscribed_lines(ranks, runs, rounds))
    busiest = "what the busiest rank sends for one call, tensor of 1 MB"
    of_threads = "seconds of a local world: ranks are threads of one process"
    of_many = "seconds of more ranks than cores"
    tables = (
        FigureTable("scale", busiest, _COUNTED_COLUMNS, counted, _COUNTED),
        FigureTable("scale_local_world", of_threads, _TIMED_COLUMNS, timed, _TIMED),
        FigureTable(
            "scale_oversubscribed", of_many, _OVERSUBSCRIBED_COLUMNS, shared, _SHARED_CORES
        ),
    )
    missing = [f"allreduce of {one.ranks} {one.started}: {one.why}" for one in worlds if one.why]
    facts = next(one.facts for one in worlds if one.facts)

    def save(path: Path) -> None:
        draw(path, worlds, model, _TENSOR)

    return BenchFigures(facts, tables, save, missing=missing)
