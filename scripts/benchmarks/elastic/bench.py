"""``elastic``: ranks that are killed, beside torch elastic and torchft; and what being ready costs.

Joins have no rows yet: ``examples/kill.py`` shows one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf
from statistics import median
from typing import Any

import numpy as np

from benchmarks.elastic import overhead
from benchmarks.elastic.killed_runs import (
    Kill,
    KilledRun,
    Launch,
    elastic_launch,
    killed_run,
    read_steps,
)
from benchmarks.elastic.rank_loops import GRADIENTS, NEIGHBORS, TRAINING
from benchmarks.elastic.rivals import torch_elastic_launch, torchft_launch, torchft_python
from benchmarks.machine_info import machine_facts
from benchmarks.ranks import Advance, RunFailedError, run_on_ranks
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import (
    FigureRow,
    FigureTable,
    RivalUnavailableError,
    TimingRow,
    time_text,
)

_ROUNDS, _QUICK_ROUNDS = 30, 2
_FROM, _TO, _RIVALS = 6, 2, 4  # ranks
_LOOPS = {
    "neighbor_allreduce, 1 MB": NEIGHBORS,
    "training, gradient_allreduce": GRADIENTS,
    "training, adapt_then_combine": TRAINING,
}
_P95 = 0.3  # seconds
_PAUSE = 0.3, 0.9  # seconds of steps before a kill
_BARS = "seconds from kill -9 until all that go on have made a step"
_KEPT = 0.99  # steps per CPU second
_CHURNED, _SECONDS = 8, 60.0  # ranks, of each run
_KILLS_COLUMNS = (
    *("who", "ranks", "kills", "failed runs", "a step", "median", "p95", "max", "of rank 0"),
)
_KILLS_NOTE = (
    "kill -9 at a random moment; time until the last of those that go on has ended a step in a "
    "membership without the dead rank. Ours die one after another, rank 0 in each run among them; "
    "a run fails if it stands still, does not end with 0, or ranks make fewer steps than others. "
    "Torch elastic restarts all ranks; torchft drops the step in hand, and its lighthouse takes a "
    "replica for dead after the given silence, by default 5 s. All train a model of 1 MB."
)
_KEPT_COLUMNS = (
    *("survivors", "kills", "steps per CPU second, undisturbed", "with kills", "with ÷ without"),
)
_KEPT_NOTE = (
    "Training by adapt_then_combine; ranks are killed as a Poisson process. Steps of those that "
    "live to the end, over CPU seconds of their processes, over the whole run, beside a run of as "
    "long without kills; each pair of runs on a line."
)


@dataclass
class Killed:
    """Kills of one loop, over all of its runs.

    Attributes:
        who: As it stands in its line.
        each: Kills in a run.
        kills: All after which the others have stepped again.
        steps: Seconds of all steps.
        runs: How many there were.
        failed: How many of them failed.
    """

    who: str
    launch: Launch
    each: int
    kills: list[Kill] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    runs: int = 0
    failed: int = 0

    @property
    def seconds(self) -> list[float]:
        """Seconds of each kill."""
        return [kill.seconds for kill in self.kills]

    def line(self, *, judged: bool) -> FigureRow:
        """Its line, judged by the 95th percentile, and by failures."""
        first, ranks = self.launch.ranks, str(self.launch.ranks)
        if not self.launch.replaces:
            ranks += f" → {first - self.each}"
        seconds = self.seconds or [inf]
        p95 = float(np.percentile(seconds, 95))
        told = [time_text(one) for one in (median(seconds), p95, max(seconds))]
        of_first = [kill.seconds for kill in self.kills if kill.rank == 0]
        cells = (
            *(self.who, ranks, f"{len(self.kills)}", f"{self.failed} of {self.runs}"),
            *(time_text(median(self.steps or [inf])), *told),
            time_text(median(of_first)) if of_first else "",
        )
        met = p95 <= _P95 and not self.failed
        return FigureRow(cells, *((f"p95 ≤ {time_text(_P95)}, none fails", met) if judged else ()))

    def row(self) -> TimingRow:
        """Each kill's seconds, for JSON."""
        return TimingRow("elastic_kills", self.who, 0, 1, self.seconds)


def _victims(rng: random.Random, launch: Launch, kills: int) -> list[int]:
    """Ranks to kill in one run, in random order; rank 0 is among them."""
    chosen = [0, *rng.sample(range(1, launch.ranks), kills - 1)]
    rng.shuffle(chosen)
    return chosen


def poisson_moments(rng: random.Random, seconds: float, most: int) -> list[float]:
    """Moments of a Poisson process, as many as fit in, at least one."""
    moments: list[float] = []
    while not moments:
        gaps = [rng.expovariate(2 * most / seconds) for _ in range(most)]
        moments = [moment for moment in accumulate(gaps) if moment < seconds]
    return moments


def _steps_of(run: KilledRun) -> list[float]:
    logs = run.folder.glob("*-*")
    return [float(seconds) for path in logs for seconds in np.diff(read_steps(path)[:, 0])]


class MeasuredRuns:
    """All runs of this bench: what could not be measured, and what failed, in sentences."""

    def __init__(self, advance: Advance) -> None:
        self._advance, self._rng = advance, random.Random(0)
        self.missing: list[str] = []
        self.failures: list[str] = []

    def kill(self, who: str, launch: Launch, kills: int, each: int, *, ends: bool) -> Killed:
        """Kill so many ranks, ``each`` in one run; check how runs end where they ``end``.

        A run that fails is told of, and what it has given before counts.
        """
        found = Killed(who, launch, each)
        while len(found.kills) < kills and found.runs < 2 * kills:
            found.runs += 1
            with self._tells(found), killed_run(launch) as run:
                try:
                    for victim in _victims(self._rng, launch, each):
                        time.sleep(self._rng.uniform(*_PAUSE))
                        run.kill(victim)
                        self._advance(f"{who}, kill {len(found.kills) + len(run.kills)}")
                    wrong = run.finish() if ends else []
                finally:
                    found.kills += run.kills
                    found.steps += _steps_of(run)
                if wrong:
                    raise RunFailedError("; ".join(wrong))
        return found

    @contextmanager
    def _tells(self, found: Killed) -> Iterator[None]:
        try:
            yield
        except RunFailedError as problem:
            found.failed += 1
            self.failures.append(f"{found.who}: {problem}")

    def kept(self, ranks: int, seconds: float) -> FigureRow | None:
        """Survivors' steps per CPU second, with kills and without, in an order drawn by lot."""
        moments = poisson_moments(self._rng, seconds, ranks // 2)
        launch = elastic_launch(TRAINING, ranks)
        plan = list(zip(_victims(self._rng, launch, len(moments)), moments, strict=True))
        rates = {}
        with self._tells(Killed("Poisson kills", launch, len(plan))):
            for killing in self._rng.sample((False, True), 2):
                self._advance(f"{len(plan) * killing} Poisson kills in {seconds:g} s")
                rates[killing] = self._rate(launch, plan, seconds, killing=killing)
        if len(rates) < 2:
            return None
        ratio = rates[True] / rates[False]
        cells = (f"{ranks - len(plan)} of {ranks}", f"{len(plan)} in {seconds:g} s")
        told = (rates[False], rates[True], f"{ratio:.3f}")
        return FigureRow((*cells, *told), f"≥ {_KEPT:g}", ratio >= _KEPT)

    def _rate(
        self, launch: Launch, plan: Sequence[tuple[int, float]], seconds: float, *, killing: bool
    ) -> float:
        """Steps per CPU second of the ranks that are not to be killed."""
        with killed_run(launch) as run:
            begun = time.monotonic()
            for victim, moment in plan if killing else ():
                time.sleep(max(begun + moment - time.monotonic(), 0))
                run.kill(victim)
            time.sleep(max(begun + seconds - time.monotonic(), 0))
            wrong = run.finish()
            if wrong:
                raise RunFailedError("; ".join(wrong))
            survivors = set(range(launch.ranks)).difference(victim for victim, _ in plan)
            logs = [read_steps(run.logs[rank]) for rank in survivors]
        spent = sum(steps[-1, 1] - steps[0, 1] for steps in logs)
        return float(sum(len(steps) - 1 for steps in logs) / spent)

    def beside(self, kills: int, *, with_torchft: bool) -> Iterator[Killed]:
        """Those of others."""
        ranks = _RIVALS
        yield self.kill("torch elastic", torch_elastic_launch(ranks), kills, ranks, ends=False)
        if not with_torchft:
            self.missing.append("torchft was not measured: it is with --with-torchft")
            return
        try:
            python = torchft_python()
        except RivalUnavailableError as problem:
            self.missing.append(f"torchft was not measured: {problem}")
            return
        for silence in (5.0, 1.0):
            who = f"torchft, dead after {silence:g} s"
            launch = torchft_launch(python, ranks, silence)
            yield self.kill(who, launch, kills, 2, ends=False)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows."""
    from benchmarks.plots import draw_bars

    quick = options.quick
    rounds = options.rounds or (_QUICK_ROUNDS if quick else _ROUNDS)
    facts: dict[str, Any] = machine_facts()
    bench = MeasuredRuns(advance)
    ranks = _RIVALS if quick else _FROM
    found = [
        bench.kill(who, elastic_launch(loop, ranks), rounds, ranks - _TO, ends=True)
        for who, loop in _LOOPS.items()
    ]
    others = list(bench.beside(max(rounds // 3, 2), with_torchft=options.with_torchft))
    lines = [one.line(judged=True) for one in found] + [one.line(judged=False) for one in others]
    advance("without a fault")
    given = {"rounds": rounds, "sample": 0.002 if quick else 0.02}
    read = run_on_ranks(2, "elastic.overhead:measure_overhead", given)
    rows = [TimingRow(*row) for row in read["rows"]]
    churned, seconds = (ranks, 4.0) if quick else (_CHURNED, _SECONDS)
    kept = [bench.kept(churned, seconds) for _ in range(max(rounds // 10, 1))]
    drawn = [one for one in (*found, *others) if one.kills]
    bars = {
        "median": ([median(one.seconds) for one in drawn], "#0072B2"),
        "most": ([max(one.seconds) for one in drawn], "#D55E00"),
    }
    costs, held = list(overhead.overhead_lines(rows)), [one for one in kept if one]
    tables = [
        FigureTable("elastic_kills", "kill → a step of all", _KILLS_COLUMNS, lines, _KILLS_NOTE),
        FigureTable("elastic_overhead", overhead.TITLE, overhead.COLUMNS, costs, overhead.NOTE),
        FigureTable("elastic_kept", "work of survivors", _KEPT_COLUMNS, held, _KEPT_NOTE),
    ]
    return BenchFigures(
        {**facts, "load_after": round(os.getloadavg()[0], 2), "rounds": rounds},
        tables,
        partial(draw_bars, names=[one.who for one in drawn], series=bars, label=_BARS),
        rows=[*rows, *(one.row() for one in drawn)],
        missing=bench.missing,
        failures=bench.failures,
    )
