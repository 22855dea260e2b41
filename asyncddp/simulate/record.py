"""Record of a simulated run: measurements over steps, and the final models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.simulate.clock import RankClocks
from asyncddp.simulate.problem import Problem, StackedBatches
from asyncddp.simulate.scenario import Numbers, Scenario
from asyncddp.simulate.stacked_model import StackedModel
from asyncddp.simulate.stacked_optimizer import StackedOptimizer

MEASURES = {
    "loss": "training loss",
    "error": "distance from the optimum",
    "score": "score of the average model",
    "consensus_distance": "consensus distance",
}
"""Measures of a run beside its costs, with their names in pictures."""


@dataclass(frozen=True)
class Run:
    r"""Record of a simulated run of one algorithm: measurements over its steps, and final models.

    Arrays have one element for each record: the first before the first step, the last after the
    last one. What was not measured is NaN.

    Attributes:
        method: Name of the method, and what was said beside it.
        parameters: The models in the end, by name of parameter, ``(n, *shape)``.
        steps: Steps made; on average, where ranks make different numbers.
        rank_steps: Steps that each rank has made, ``(records, n)``.
        seconds: Time until the last rank had made them, by the cost model.
        bytes_sent: Bytes that a rank has sent, on average.
        loss: Mean over ranks of the losses of their batches, since the last record.
        error: :math:`\lVert X - 1 x^{*T} \rVert_F / (\sqrt n \lVert x^* \rVert)`, where the optimum
            :math:`x^*` is known.
        score: What ``Problem.evaluate`` says of the average model.
        consensus_distance: :math:`\sqrt{\frac1n \sum_i \lVert x_i - \bar x \rVert^2}`.
    """

    method: str
    parameters: dict[str, torch.Tensor] = field(repr=False)
    steps: npt.NDArray[np.int64] = field(repr=False)
    rank_steps: npt.NDArray[np.int64] = field(repr=False)
    seconds: Numbers = field(repr=False)
    bytes_sent: Numbers = field(repr=False)
    loss: Numbers = field(repr=False)
    error: Numbers = field(repr=False)
    score: Numbers = field(repr=False)
    consensus_distance: Numbers = field(repr=False)

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Return all measurements in long form: one row per record and measurement.

        Returns:
            The columns ``method``, ``step``, ``seconds``, ``bytes_sent``, ``measure`` and
            ``value``: ``pandas.DataFrame(run.table())``.
        """
        values = {name: getattr(self, name) for name in MEASURES}
        kept = {name: ~np.isnan(value) for name, value in values.items()}
        return {
            "method": np.repeat(self.method, sum(int(one.sum()) for one in kept.values())),
            "step": np.concatenate([self.steps[one] for one in kept.values()]),
            "seconds": np.concatenate([self.seconds[one] for one in kept.values()]),
            "bytes_sent": np.concatenate([self.bytes_sent[one] for one in kept.values()]),
            "measure": np.repeat(list(kept), [int(one.sum()) for one in kept.values()]),
            "value": np.concatenate([values[name][one] for name, one in kept.items()]),
        }


def table(runs: Sequence[Run]) -> dict[str, npt.NDArray[Any]]:
    """Concatenate the tables of several runs; see :meth:`Run.table`.

    Args:
        runs: At least one.
    """
    parts = [run.table() for run in runs]
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}


class MetricsRecorder:
    """Recorder of a simulated run's measurements, such as loss and consensus distance.

    Args:
        problem: The problem, whose optimum and ``evaluate`` are used.
        model: The models.
    """

    def __init__(self, problem: Problem, model: StackedModel) -> None:
        self._problem, self._model = problem, model
        self._rows: list[tuple[float, ...]] = []
        self._losses: list[float] = []
        self._rank_steps: list[Sequence[int]] = []

    def add_losses(self, losses: torch.Tensor) -> None:
        """Record the losses of the ranks in a step."""
        self._losses.append(float(losses.double().mean()))

    def record(
        self,
        step: int,
        seconds: float,
        bytes_sent: float,
        ranks: Sequence[int],
        rank_steps: Sequence[int],
    ) -> None:
        """Measure the models of the given ranks now."""
        self._rank_steps.append(list(rank_steps))
        rows = self._model.flat_rows()[list(ranks)]
        mean = rows.mean(dim=0)
        distance = float((rows - mean).square().sum(dim=1).mean().sqrt())
        error = score = float("nan")
        if self._problem.optimum is not None:
            optimum = self._problem.optimum.reshape(-1).to(rows)
            error = float((rows - optimum).square().sum(dim=1).mean().sqrt() / optimum.norm())
        if self._problem.evaluate is not None:
            with torch.no_grad():
                score = float(self._problem.evaluate(self._model.average_model(ranks).eval()))
        loss = float(np.mean(self._losses)) if self._losses else float("nan")
        self._losses = []
        self._rows.append((step, seconds, bytes_sent, loss, error, score, distance))

    def finish(self, method: str) -> Run:
        """Return the record of the run."""
        columns = [np.array(column, dtype=np.float64) for column in zip(*self._rows, strict=True)]
        final = {name: one.detach().clone() for name, one in self._model.parameters.items()}
        steps = columns[0].astype(np.int64), np.array(self._rank_steps, dtype=np.int64)
        return Run(method, final, *steps, *columns[1:])


@dataclass(frozen=True)
class SimulatedRanks:
    """Models, optimizer and data of all ranks, with clocks and a recorder of measurements.

    Attributes:
        model: The models.
        optimizer: Their optimizer, or one a rank.
        scenario: Speeds, links, delays, losses and departures.
        batches: Batches of each rank.
        clocks: Time and bytes of ranks that make their steps together.
        recorder: Collects what is measured.
    """

    model: StackedModel
    optimizer: StackedOptimizer
    scenario: Scenario
    batches: StackedBatches
    clocks: RankClocks
    recorder: MetricsRecorder

    def steps_made(self, step: int) -> list[int]:
        """Return each rank's number of steps after ``step`` steps of the remaining ranks."""
        return self.scenario.steps_made(self.model.ranks, step)
