"""``train``: trains models of n virtual ranks in one process by any of asyncddp's algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncddp.algorithms import Algorithm
from asyncddp.algorithms.wrapper_setup import checked_bucket_bytes, checked_integer
from asyncddp.optim.method_settings import MethodSettings, set_gradient_meaning
from asyncddp.simulate.asynchronous_run import AsynchronousRun, runs_asynchronously
from asyncddp.simulate.clock import RankClocks
from asyncddp.simulate.method_run import MethodRun
from asyncddp.simulate.problem import Problem, StackedBatches
from asyncddp.simulate.record import MetricsRecorder, Run, SimulatedRanks
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
    r"""Train the models of n virtual ranks together in this process.

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
        scenario: Speeds, links, losses, and ranks that come and go; None for equal ranks.
        schedule: Makes a scheduler of the learning rate for an optimizer; it goes on each step.
        record_every: Steps from one record to the next.
        seed: Seed of the batches.
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
    checked_integer("argument steps", steps, 0)
    scenario.check(problem.ranks, steps)
    checked_integer("argument record_every", record_every, 1)
    method_settings = MethodSettings.of(algorithm, settings)
    method_settings = replace(method_settings, topology=topology)
    bucket_bytes = checked_bucket_bytes(method_settings.bucket_size_in_mb)
    fragments = method_settings.create_method().fragments
    model = StackedModel(problem, bucket_bytes, chunk_size, fragments)
    recorder = MetricsRecorder(problem, model)
    asynchronous = runs_asynchronously(method_settings, scenario, problem.ranks)
    stacked = StackedOptimizer(model, optimizer, schedule, by_rank=asynchronous)
    clocks = RankClocks(scenario, problem.ranks, scenario.byte_scale(model.nbytes))
    batches = StackedBatches(problem, seed)
    ranks = SimulatedRanks(model, stacked, scenario, batches, clocks, recorder)
    method = method_settings.create_method()
    method.check_optimizer(stacked.groups)
    set_gradient_meaning(method, stacked.groups, averages=problem.ranks > 1)
    warming = method.warms_up(stacked.groups, 0)

    def begin(made: int) -> MethodRun | AsynchronousRun:
        """Begin with the method, or its warm-up, after ``made`` steps."""
        if warming:
            before = method_settings.before(method)
            return MethodRun(ranks, before, before.create_method(), made)
        if asynchronous:
            return AsynchronousRun(ranks, method_settings, steps, made)
        return MethodRun(ranks, method_settings, method, made)

    run = begin(0)
    for step in range(steps + 1):
        if step:
            run.advance(step)
        if step % record_every == 0 or step == steps:
            run.record(step)
        if progress is not None and step:
            progress(step)
        if step and warming and not (warming := method.warms_up(stacked.groups, step)):
            run = begin(step)
    return recorder.finish(method_settings.describe())
