"""Training on digits that differ between ranks, each method with the best step size of a grid.

As in the papers whose orders are judged, what counts is the accuracy of the ranks' own models, on
average; step sizes are chosen on other seeds than those that are shown.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import torch

from asyncddp import simulate, topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.methods.contender import Contender
from benchmarks.methods.grid import Grid, Values
from benchmarks.ranks import Advance

Place = tuple[str, str]
"""Row and column of a table."""
AXIS = "accuracy on images set aside, %"
_BETA = 0.9
_ERRORS = 2.0  # standard errors, within which a difference says nothing
_MOMENTUM = {"beta": _BETA}
METHODS = (
    Contender("D-SGD", "adapt_then_combine"),
    Contender("gradient tracking", "gradient_tracking"),
    Contender("D-SGD with momentum", "adapt_then_combine", momentum=_BETA),
    Contender("QG-DSGDm", "quasi_global_momentum", _MOMENTUM),
    Contender("DecentLaM", "decentlam", _MOMENTUM),
    Contender("momentum tracking", "momentum_tracking", _MOMENTUM),
    Contender("allreduce, momentum", "gradient_allreduce", momentum=_BETA),
)


@dataclass(frozen=True)
class TunedTraining:
    """How a method is trained.

    Attributes:
        steps: Of each rank.
        seeds: Of the trainings that are shown.
        tuned_on: Seeds on which the step size is chosen.
        factors: Step sizes to try, times 0.1.
        falling: Whether the step size falls to 0 along a cosine; else it stays.
    """

    steps: int = 150
    seeds: tuple[int, ...] = tuple(range(10))
    tuned_on: tuple[int, ...] = (100, 101)
    factors: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    falling: bool = True

    def note(self, where: str) -> str:
        """Tell it, after what is trained on."""
        grid = ", ".join(f"{factor:g}" for factor in self.factors)
        course = ", step size down to 0 along a cosine" if self.falling else ""
        return (
            f"{where}; {self.steps} steps of 16 images{course}; mean of {len(self.seeds)} seeds ± "
            "half of what lies between them, and in aims the paired difference ± its standard "
            f"error. Step sizes are the best of 0.1 times {grid} on {len(self.tuned_on)} other "
            "seeds"
        )


def mean_accuracy(problem: simulate.Problem, run: simulate.Run) -> float:
    """Return the accuracy of the ranks' own models, on average."""
    assert problem.evaluate is not None
    assert isinstance(problem.model, torch.nn.Module)
    model, found = copy.deepcopy(problem.model), []
    for rank in range(problem.ranks):
        model.load_state_dict({name: rows[rank] for name, rows in run.parameters.items()})
        found.append(problem.evaluate(model))
    return sum(found) / len(found)


@dataclass(frozen=True)
class Trial:
    """Training of one method on one graph, with digits shared out in one way.

    Attributes:
        one: The method.
        graph: Of the ranks.
        data: How images are shared out, as ``asyncddp.simulate.digits`` is told.
        training: How it is trained.
    """

    one: Contender
    graph: GraphOrSchedule
    data: Mapping[str, Any]
    training: TunedTraining

    @property
    def _rates(self) -> Sequence[float]:
        """Step sizes to try, alike over 1 - β but for the methods without, which need less."""
        scale = 1 - _BETA if self.one.momentum or "beta" in self.one.settings else 0.1
        return [scale * factor for factor in self.training.factors]

    def _accuracy(self, rate: float, seed: int) -> float:
        """Return the accuracy of the ranks' own models."""
        steps, ranks = self.training.steps, topology.as_schedule(self.graph).n
        problem = simulate.digits(ranks, seed=seed, **self.data)
        cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
        schedule = cosine if self.training.falling else None
        run = self.one.train(problem, rate, self.graph, steps=steps, seed=seed, schedule=schedule)
        assert run is not None, f"{self.one.title} is refused"
        return mean_accuracy(problem, run)

    def accuracies(self) -> tuple[float, Values]:
        """Return the best step size on some seeds, and the accuracies with it on others."""
        by_rate = {
            rate: fmean(self._accuracy(rate, seed) for seed in self.training.tuned_on)
            for rate in self._rates
        }
        best = max(by_rate, key=lambda rate: by_rate[rate])
        return best, tuple(self._accuracy(best, seed) for seed in self.training.seeds)


@dataclass(frozen=True)
class PairedDifference:
    r"""Mean difference of two methods on the same seeds, and its standard error.

    .. math:: \bar d = \frac1S \sum_s (a_s - b_s), \qquad
              e = \sqrt{\frac1{S (S - 1)} \sum_s (a_s - b_s - \bar d)^2}

    Attributes:
        mean: :math:`\bar d`.
        error: e.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, one: Values, other: Values) -> PairedDifference:
        """Return the difference of figures of the same seeds, at least two."""
        differences = [a - b for a, b in zip(one, other, strict=True)]
        return cls(fmean(differences), stdev(differences) / sqrt(len(differences)))

    @property
    def positive(self) -> bool | None:
        """Whether it is above 0; None within twice its standard error of 0."""
        return None if abs(self.mean) <= _ERRORS * self.error else self.mean > 0

    def told(self, scale: float) -> str:
        """Tell mean and standard error, both times a factor."""
        return f"{scale * self.mean:+.1f} ± {scale * self.error:.1f}"


def percent(values: Values) -> str:
    """Tell a share, and half of what lies between the seeds."""
    mean = f"{100 * fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {50 * (max(values) - min(values)):.1f}"


def measured(
    trials: Mapping[Place, Trial], advance: Advance
) -> tuple[dict[Place, Values], dict[Place, float]]:
    """Return accuracies and step sizes by place."""
    values: dict[Place, Values] = {}
    rates: dict[Place, float] = {}
    for place, trial in trials.items():
        advance(f"digits, {', '.join(place)}")
        rates[place], values[place] = trial.accuracies()
    return values, rates


def tuned_grid(
    key: str,
    title: str,
    trials: Mapping[Place, Trial],
    advance: Advance,
    where: str,
    better: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> Grid:
    """Measure a grid.

    Args:
        key: Of the grid.
        title: Of the grid.
        trials: By row and column.
        advance: Told each place.
        where: What is trained on.
        better: Rows of which the first must be ahead of the second, in the first column.
        **options: Of :class:`Grid`.
    """
    values, rates = measured(trials, advance)
    rows, columns = (list(dict.fromkeys(place[k] for place in trials)) for k in (0, 1))
    training, first = next(iter(trials.values())).training, columns[0]
    note = f"{training.note(where)}: {told_rates(rates, rows)}."
    aims = {
        one: ahead(f"> {other}", values[one, first], values[other, first]) for one, other in better
    }
    return Grid(
        key,
        title,
        rows,
        columns,
        values,
        percent,
        AXIS,
        aims=aims,
        note=note,
        scale=100.0,
        **options,
    )


def ahead(words: str, one: Values, other: Values) -> tuple[str, bool | None]:
    """Judge whether one is ahead of the other by what differs on the same seeds."""
    difference = PairedDifference.of(one, other)
    told = f"{words}: {difference.told(100)}"
    if difference.positive is None:
        return f"{told}, less than twice its error", None
    return told, difference.positive


def told_rates(rates: Mapping[Place, float], rows: Sequence[str]) -> str:
    """Tell the step sizes that were chosen, row by row."""
    by_row = {row: [rate for (name, _), rate in rates.items() if name == row] for row in rows}
    told = (f"{row} {' / '.join(f'{rate:g}' for rate in own)}" for row, own in by_row.items())
    return "; ".join(told)
