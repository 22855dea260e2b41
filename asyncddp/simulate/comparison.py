"""``compare``: runs several algorithms on one problem, and plots their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncddp.errors import ArgumentError
from asyncddp.install_commands import needed_package
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.simulate.problem import Problem
from asyncddp.simulate.record import MEASURES, Run
from asyncddp.simulate.stacked_optimizer import OptimizerFactory
from asyncddp.simulate.training import train
from asyncddp.topology import TopologyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Method: TypeAlias = str | tuple[str, Mapping[str, Any]]
"""Name of a method, or that and its settings."""

_LINEAR = {"score"}


@dataclass(frozen=True)
class MethodComparison:
    """Simulated runs of several algorithms on one problem.

    Attributes:
        problem: Its name.
        runs: A run for each method that works, in the order asked for.
        refused: Why each of the others does not.
    """

    problem: str
    runs: list[Run]
    refused: dict[str, str]


def compare(
    problem: Problem,
    methods: Sequence[Method],
    optimizer: OptimizerFactory,
    *,
    steps: int,
    progress: Callable[[str, int], None] | None = None,
    **settings: Any,
) -> MethodComparison:
    """Train the same models on the same batches by several methods, one method at a time.

    Args:
        problem: Model, loss and data of each rank.
        methods: Names, or pairs of a name and settings such as ``("choco_sgd", {"compression":
            "sign"})``.
        optimizer: Makes the optimizer of one model out of its parameters.
        steps: Number of steps of each rank.
        progress: Called with the method and the number of steps made, after each.
        **settings: All else that :func:`train` takes, for all methods: ``topology``, ``scenario``,
            ``record_every``, ``seed`` and settings of the method.

    Returns:
        The runs, and which methods cannot live with the topology or the optimizer, and why.

    Raises:
        ArgumentError: No method works; the message has each one's reason. Or, before any has run: a
            method or setting of one that there is not, or a scenario of other ranks.

    Example:
        >>> import torch
        >>> from asyncddp import simulate, topology
        >>> found = simulate.compare(
        ...     simulate.least_squares(16),
        ...     ["gradient_allreduce", "adapt_then_combine"],
        ...     lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     topology=topology.base_k(16, 1),
        ...     scenario=simulate.Scenario(links="100Mbit,20ms"),
        ...     steps=300,
        ... )
        >>> for run in found.runs:
        ...     print(f"{run.method:20} {run.error[-1]:.0e} {run.seconds[-1]:3.0f} s")
        gradient_allreduce   6e-12  15 s
        adapt_then_combine   2e-01   9 s
    """
    runs: list[Run] = []
    refused: dict[str, str] = {}
    named = [(one, {}) if isinstance(one, str) else one for one in methods]
    for name, own in named:
        MethodSettings.of(name, own).create_method()
    if settings.get("scenario") is not None:
        settings["scenario"].check(problem.ranks, steps)
    for name, own in named:
        told = None if progress is None else partial(progress, name)
        try:
            arguments = {**settings, **own}
            runs.append(train(problem, optimizer, name, steps=steps, progress=told, **arguments))
        except (ArgumentError, TopologyError) as error:
            refused[name] = str(error)
    if not runs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ArgumentError(f"compare: none of the methods can be simulated so: {reasons}")
    return MethodComparison(problem.name, runs, refused)


def draw(runs: Sequence[Run], title: str = "") -> Figure:
    """Plot the measurements over steps, bytes and seconds, one line per run.

    Args:
        runs: Runs of one problem, at least one.
        title: Above the picture.

    Returns:
        A ``matplotlib.figure.Figure``: ``draw(runs).savefig("compare.png")``.

    Raises:
        EnvironmentProblem: matplotlib is not installed.

    Example:
        >>> import torch
        >>> from asyncddp import simulate
        >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        >>> run = simulate.train(simulate.least_squares(4), sgd, steps=3)
        >>> [axes.get_ylabel() for axes in simulate.draw([run]).axes][::3]
        ['training loss', 'distance from the optimum', 'consensus distance']
    """
    with needed_package("simulate.draw needs matplotlib", "plot"):
        from matplotlib.figure import Figure
    measures = [
        name for name in MEASURES if any(np.isfinite(getattr(run, name)).any() for run in runs)
    ]
    figure = Figure((11, 0.8 + 2.3 * len(measures)), layout="constrained")
    every = figure.subplots(len(measures), 3, squeeze=False, sharex="col", sharey="row")
    for row, measure in zip(every, measures, strict=True):
        row[0].set_ylabel(MEASURES[measure])
        for axes, costs in zip(row, ("steps", "bytes_sent", "seconds"), strict=True):
            _draw_lines(axes, runs, costs, measure)
    for axes, label in zip(every[-1], ("steps", "MB sent by a rank", "seconds"), strict=True):
        axes.set_xlabel(label)
    figure.suptitle(title, x=0.01, ha="left", size=11)
    figure.legend(*every[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _draw_lines(axes: Axes, runs: Sequence[Run], costs: str, measure: str) -> None:
    """Plot one measurement of all runs over one kind of cost."""
    for run in runs:
        x, y = getattr(run, costs) / (1e6 if costs == "bytes_sent" else 1), getattr(run, measure)
        shown = np.isfinite(y) if measure in _LINEAR else np.isfinite(y) & (y > 0)
        axes.plot(x[shown], y[shown], lw=1.3, label=run.method)
    axes.set_yscale("linear" if measure in _LINEAR else "log")
    axes.grid(alpha=0.3)
