"""Benchmark tables of a training step, alone and with every averaging method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import asyncddp as bf
from asyncddp import topology
from benchmarks.tables import Call, RankGroup, Rival, Target, TimingTable
from benchmarks.training_models import Workload

LOCAL, DDP = "local step", "DDP gloo"
AWC, ATC = "adapt_with_combine, one-peer", "adapt_then_combine, one-peer"
ATC_IN_BACKWARD = "adapt_then_combine in backward, one-peer"


@dataclass
class TrainingSetup:
    """Model with its batch and optimizer, which a method may wrap.

    Attributes:
        model: What is called in forward.
        optimizer: What steps.
        loss: Of the model's output and the targets.
        keeps_gradients: Whether their memory stays where it is, filled with zeros.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keeps_gradients: bool = False

    def step(self, number: int) -> torch.Tensor:
        """zero_grad, forward, backward, step; gives the loss."""
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        loss = self.loss(self.model(self.inputs), self.targets)
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
    plain = workload.optimizer(model.parameters())
    return TrainingSetup(model, plain, inputs, targets, workload.loss)


def ddp(training: TrainingSetup, world: RankGroup, **options: Any) -> None:
    """Torch's DistributedDataParallel; all but the options is as it comes.

    Raises:
        Unavailable: gloo does not run here.
    """
    world.need_gloo()
    training.model = torch.nn.parallel.DistributedDataParallel(training.model, **options)


def ours(training: TrainingSetup, algorithm: str, graph: Any = None, **options: Any) -> None:
    """Our wrapper around the optimizer."""
    training.optimizer = bf.DistributedOptimizer(
        training.optimizer, training.model, algorithm, topology=graph, **options
    )


def our_methods(world: RankGroup) -> dict[str, Method]:
    """List our methods by name."""
    one_peer = topology.one_peer_exponential(world.size)
    exp2 = topology.exponential_two(world.size)
    awc, atc = "adapt_with_combine", "adapt_then_combine"
    return {
        "gradient_allreduce": partial(ours, algorithm="gradient_allreduce"),
        f"{awc}, exp-2": partial(ours, algorithm=awc, graph=exp2),
        AWC: partial(ours, algorithm=awc, graph=one_peer),
        f"{atc}, exp-2": partial(ours, algorithm=atc, graph=exp2),
        ATC: partial(ours, algorithm=atc, graph=one_peer),
        ATC_IN_BACKWARD: partial(ours, algorithm=atc, graph=one_peer, update_in_backward=True),
    }


def all_methods(world: RankGroup) -> dict[str, Method]:
    """List all methods by name, the plain local step first."""
    return {
        LOCAL: lambda training: None,
        DDP: partial(ddp, world=world),
        f"{DDP}, static_graph": partial(ddp, world=world, static_graph=True),
        f"{DDP}, gradient_as_bucket_view": partial(ddp, world=world, gradient_as_bucket_view=True),
        **our_methods(world),
    }


def step_table(
    world: RankGroup,
    workload: Workload,
    methods: Mapping[str, Method],
    key: str,
    title: str,
    targets: Sequence[Target] = (),
    ended: Callable[[Call], Call] = lambda call: call,
    device: Any = "cpu",
    note: str = "",
) -> TimingTable:
    """A step of every method, each on a model of its own, over a single size: the model's.

    Args:
        world: The ranks.
        workload: What is trained.
        methods: By name; the first is what others are compared with.
        key: Of the table.
        title: Of the table.
        targets: Of the table.
        ended: Makes a call that lasts until the device is through with it.
        device: Of the model and its batch.
        note: Of the table.
    """

    def prepare(method: Method, nbytes: int) -> Call:
        with torch.device(device):
            made = make_training(world, workload)
        method(made)
        return ended(made.step)

    return TimingTable(
        key,
        title,
        [workload.nbytes],
        [Rival(name, partial(prepare, method)) for name, method in methods.items()],
        size_is="model",
        targets=targets,
        lead=1,
        samples=workload.samples * world.size,
        note=note,
    )
