"""``train``: the models of n virtual ranks trained in one process, by a method of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.wrapper_setup import checked_bucket_bytes, checked_integer
from asyncddp.optim.method_settings import MethodSettings, set_gradient_meaning
from asyncddp.simulate.asynchronous_run import AsynchronousRun, WarmUp, runs_asynchronously
from asyncddp.simulate.clock import RankClocks
from asyncddp.simulate.method_checks import built_topology
from asyncddp.simulate.method_run import MethodRun
from asyncddp.simulate.problem import Batch, Problem, StackedBatches
from asyncddp.simulate.record import MetricsRecorder, Run
from asyncddp.simulate.scenario import Scenario
from asyncddp.simulate.stacked_model import StackedModel
from asyncddp.simulate.stacked_optimizer import (
    OptimizerFactory,
    SchedulerFactory,
    StackedOptimizer,
)
from asyncddp.topology.builders import TopologyLike


def train(
    problem: Problem,
    optimizer: OptimizerFactory,
    algorithm: str | type[Algorithm] = "adapt_then_combine",
    *,
    steps: int,
    topology: TopologyLike | None = None,
    scenario: Scenario | None = None,
    schedule: SchedulerFactory | None = None,
    record_every: int = 1,
    seed: int = 0,
    chunk_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> Run:
    r"""Train the models of n virtual ranks in this process, all at once.

    .. math:: X^{k+1} = W^{(k)} \big(X^k - U(G(X^k))\big)

    for ``adapt_then_combine``. The rows of X are the ranks' models, of which ``torch.func.vmap``
    computes the gradients; W is one product. The method is the very class that real ranks run, with
    its hooks, its compressor and its schedule, and so are the numbers, up to the order of sums.
    Methods that let each rank go on at its own pace are as where ranks meet in each round, unless
    the scenario is asynchronous: then events are ordered by their time, ``steps`` are those that
    ranks make on average, and a fast rank makes more of them.

    Args:
        problem: Model, loss and data of each rank.
        optimizer: Makes the optimizer of one model out of its parameters,
            ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``.
        algorithm: Name of a method, or a subclass of ``asyncddp.algorithms.Algorithm``.
        steps: Number of steps of each rank, or on average.
        topology: Who averages with whom; or a function that builds it for a number of nodes, such
            as ``topology.ring``, or its name: ranks, or machines where the method averages between
            them. None for the method's own.
        scenario: Speeds, links, delays, losses and departures; None for equal ranks.
        schedule: Makes a scheduler of the learning rate for an optimizer; it goes on each step.
        record_every: Steps from one record to the next.
        seed: Of batches.
        chunk_size: Ranks whose gradients are computed at once; None chooses by the model.
        progress: Called with the number of steps made, after each.
        **settings: Settings of the method as in :class:`asyncddp.DistributedOptimizer`, such as
            ``compression`` and ``num_steps_per_communication``, and its options.

    Returns:
        What was measured, and the models in the end.

    Raises:
        ArgumentError: An argument that cannot be, or a method that cannot be simulated.
        TopologyError: The method cannot live with the topology.

    Example:
        >>> import torch
        >>> from asyncddp import simulate, topology
        >>> problem = simulate.least_squares(1000)
        >>> run = simulate.train(
        ...     problem,
        ...     lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ...     topology=topology.one_peer_exponential(1000),
        ...     steps=100,
        ... )
        >>> print(f"{run.error[0]:.3f} {run.error[-1]:.3f}")
        1.000 0.205
    """
    scenario = Scenario() if scenario is None else scenario
    scenario.check(problem.ranks)
    checked_integer("argument steps", steps, 0)
    checked_integer("argument record_every", record_every, 1)
    method_settings = MethodSettings.of(algorithm, settings)
    if topology is not None and (callable(topology) or isinstance(topology, str)):
        topology = built_topology(method_settings, topology, scenario, problem.ranks)
    method_settings = replace(method_settings, topology=topology)
    bucket_bytes = checked_bucket_bytes(method_settings.bucket_size_in_mb)
    fragments = method_settings.create_method().fragments
    model = StackedModel(problem, bucket_bytes, chunk_size, fragments)
    batches, recorder = StackedBatches(problem, seed), MetricsRecorder(problem, model)
    asynchronous = runs_asynchronously(method_settings, scenario, problem.ranks)
    stacked = StackedOptimizer(model, optimizer, schedule, by_rank=asynchronous)
    training = _Training(method_settings, model, stacked, scenario, in_step=not asynchronous)

    def tell(step: int, run: _Training | AsynchronousRun) -> None:
        if step % record_every == 0 or step == steps:
            run.record(step, recorder)
        if progress is not None and step:
            progress(step)

    ranks = list(range(problem.ranks))
    tell(0, training)
    while training.goes_on and training.made < steps:
        losses = training.step(batches.of(ranks, [training.made] * len(ranks)))
        recorder.add_losses(losses[training.there])
        tell(training.made, training)
    if asynchronous:
        begun = training.warm_up
        run = AsynchronousRun(method_settings, model, stacked, scenario, batches, steps, begun)
        for step in range(training.made + 1, steps + 1):
            run.advance(step * problem.ranks)
            tell(step, run)
    return recorder.finish(method_settings.describe())


class _Training:
    """Training of all ranks in step, by a method after its warm-up, if it has one.

    Args:
        settings: The method.
        model: The models.
        optimizer: Their optimizer.
        scenario: Speeds, links, losses and departures.
        in_step: Whether it goes on after the warm-up.

    Attributes:
        made: Steps made.
        there: The ranks that have not left.
    """

    def __init__(
        self,
        settings: MethodSettings,
        model: StackedModel,
        optimizer: StackedOptimizer,
        scenario: Scenario,
        *,
        in_step: bool,
    ) -> None:
        self._settings, self._model, self._optimizer = settings, model, optimizer
        self._scenario = scenario
        self._method = settings.create_method()
        self._method.check_optimizer(optimizer.groups)
        set_gradient_meaning(self._method, optimizer.groups, averages=model.ranks > 1)
        self._clocks = RankClocks(scenario, model.ranks)
        self._bytes = np.zeros(model.ranks)
        self._scale = scenario.byte_scale(model.nbytes)
        self.there: list[int] = list(range(model.ranks))
        self._warming = self._method.warms_up(optimizer.groups, 0)
        self._in_step, self.made = in_step, 0
        self._run = self._begin()

    @property
    def goes_on(self) -> bool:
        """Whether the next step is one of ranks in step."""
        return self._run is not None

    @property
    def warm_up(self) -> WarmUp:
        """What ranks have made that go on at their own pace."""
        steps = [
            self._scenario.departures.get(rank, self.made) for rank in range(self._model.ranks)
        ]
        return WarmUp([min(self.made, own) for own in steps], self._clocks.now, self._bytes)

    def _begin(self) -> MethodRun | None:
        if not self._warming and not self._in_step:
            return None
        settings, method = self._settings, self._method
        if self._warming:
            settings = settings.before(method)
            method = settings.create_method()
        return MethodRun(settings, method, self._model, self._optimizer, self._scenario)

    def step(self, batch: Batch) -> torch.Tensor:
        """Make a step; return the losses of all ranks."""
        assert self._run is not None
        active = self._scenario.active(self._model.ranks, self.made)
        self.there = np.flatnonzero(active).tolist()
        losses = self._run.step(batch, active)
        traffic = self._run.traffic
        if traffic is not None:
            traffic.nbytes *= self._scale
            self._bytes += traffic.bytes_sent
        self._clocks.advance(traffic, active, hidden=self._run.hidden)
        self.made += 1
        if self._warming:
            self._warming = self._method.warms_up(self._optimizer.groups, self.made)
            if not self._warming:
                self._run = self._begin()
        return losses

    def record(self, step: int, recorder: MetricsRecorder) -> None:
        """Record what is now, of the ranks that are there."""
        there = self.there
        seconds = float(self._clocks.now[there].max())
        recorder.record(step, seconds, float(self._bytes[there].mean()), there, self.warm_up.steps)
