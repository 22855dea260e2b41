"""Benchmark tables of a training step, alone and with every averaging method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import asyncddp as bf
from asyncddp import topology
from asyncddp.topology import GraphOrSchedule
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable
from benchmarks.training_models import Workload

__all__ = [
    "ATC",
    "ATC_IN_BACKWARD",
    "AWC",
    "DDP",
    "LOCAL",
    "TrainingSetup",
    "make_training",
    "ours",
    "step_table",
]

LOCAL, DDP = "local step", "DDP gloo"
AWC, ATC = "adapt_with_combine, one-peer", "adapt_then_combine, one-peer"
ATC_IN_BACKWARD = "adapt_then_combine in backward, one-peer"
_RATE, _MOMENTUM = 1e-4, 0.9


@dataclass
class TrainingSetup:
    """Model with its batch and optimizer, which a method may wrap.

    Attributes:
        model: What is called in forward.
        optimizer: What steps.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    inputs: torch.Tensor
    targets: torch.Tensor

    def step(self, number: int) -> torch.Tensor:
        """zero_grad, forward, backward, step; gives the loss."""
        del number
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss


Method = Callable[[TrainingSetup], None]


def make_training(world: RankGroup, workload: Workload) -> TrainingSetup:
    """Create the same model on all ranks, with this rank's own data."""
    torch.manual_seed(0)
    model = workload.build()
    torch.manual_seed(1 + world.rank)
    inputs, targets = workload.batch(workload.samples)
    plain = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
    return TrainingSetup(model, plain, inputs, targets)


def _ddp(
    world: RankGroup,
    training: TrainingSetup,
    *,
    static_graph: bool = False,
    views: bool = False,
) -> None:
    """Torch's DistributedDataParallel; all else is as it comes.

    Raises:
        Unavailable: gloo does not run here.
    """
    if world.gloo is not None:
        raise RivalUnavailableError(world.gloo)
    training.model = torch.nn.parallel.DistributedDataParallel(
        training.model, static_graph=static_graph, gradient_as_bucket_view=views
    )


def ours(
    training: TrainingSetup,
    *,
    algorithm: str,
    graph: GraphOrSchedule | None = None,
    update_in_backward: bool = False,
) -> None:
    """Our wrapper around the optimizer."""
    training.optimizer = bf.DistributedOptimizer(
        training.optimizer,
        training.model,
        algorithm,
        topology=graph,
        update_in_backward=update_in_backward,
    )


def _methods(world: RankGroup) -> dict[str, Method]:
    """List all methods by name, the plain local step first."""
    one_peer = topology.one_peer_exponential(world.size)
    exp2 = topology.exponential_two(world.size)
    awc, atc = "adapt_with_combine", "adapt_then_combine"
    return {
        LOCAL: lambda training: None,
        DDP: partial(_ddp, world),
        f"{DDP}, static_graph": partial(_ddp, world, static_graph=True),
        f"{DDP}, gradient_as_bucket_view": partial(_ddp, world, views=True),
        "gradient_allreduce": partial(ours, algorithm="gradient_allreduce"),
        f"{awc}, exp-2": partial(ours, algorithm=awc, graph=exp2),
        AWC: partial(ours, algorithm=awc, graph=one_peer),
        f"{atc}, exp-2": partial(ours, algorithm=atc, graph=exp2),
        ATC: partial(ours, algorithm=atc, graph=one_peer),
        ATC_IN_BACKWARD: partial(ours, algorithm=atc, graph=one_peer, update_in_backward=True),
    }


def step_table(world: RankGroup, workload: Workload, targets: Sequence[Target] = ()) -> TimingTable:
    """A step of every method, each on a model of its own, over a single size: the model's."""

    def rival(name: str, method: Method) -> Rival:
        def prepare(nbytes: int) -> Call:
            made = make_training(world, workload)
            method(made)
            return made.step

        return Rival(name, prepare)

    rivals = [rival(name, method) for name, method in _methods(world).items()]
    note = (
        f"{workload.nbytes / 4e6:.3g} million parameters in float32, SGD with momentum. Before the "
        "clock starts each method makes a step that does not count, so that what reaches over from "
        "step to step is paid for."
    )
    return TimingTable(
        f"step_{workload.key}",
        f"a step of {workload.title}",
        [workload.nbytes],
        rivals,
        size_is="model",
        targets=targets,
        lead=1,
        samples=workload.samples * world.size,
        note=note,
    )
