"""A training step, alone and with every way of averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import asyncddp as bf
import topology
from benchmarks.contract import Aim, Call, Rival, Table, Unavailable, World
from benchmarks.models import Workload
from topology import GraphOrSchedule

__all__ = [
    "ATC",
    "ATC_IN_BACKWARD",
    "AWC",
    "DDP",
    "LOCAL",
    "Trainee",
    "ours",
    "step_table",
    "trainee",
]

LOCAL, DDP = "local step", "DDP gloo"
AWC, ATC = "adapt_with_combine, one-peer", "adapt_then_combine, one-peer"
ATC_IN_BACKWARD = "adapt_then_combine in backward, one-peer"
_RATE, _MOMENTUM = 1e-4, 0.9


@dataclass
class Trainee:
    """A model with its batch and its plain optimizer; a method puts itself around both.

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


Method = Callable[[Trainee], None]


def trainee(world: World, workload: Workload) -> Trainee:
    """The same model on all ranks, and data of this rank's own."""
    torch.manual_seed(0)
    model = workload.build()
    torch.manual_seed(1 + world.rank)
    inputs, targets = workload.batch(workload.samples)
    plain = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
    return Trainee(model, plain, inputs, targets)


def _ddp(
    world: World, trainee: Trainee, *, static_graph: bool = False, views: bool = False
) -> None:
    """Torch's DistributedDataParallel; all else is as it comes.

    Raises:
        Unavailable: gloo does not run here.
    """
    if world.gloo is not None:
        raise Unavailable(world.gloo)
    trainee.model = torch.nn.parallel.DistributedDataParallel(
        trainee.model, static_graph=static_graph, gradient_as_bucket_view=views
    )


def ours(
    trainee: Trainee,
    *,
    algorithm: str,
    graph: GraphOrSchedule | None = None,
    update_in_backward: bool = False,
) -> None:
    """Our wrapper around the optimizer."""
    trainee.optimizer = bf.DistributedOptimizer(
        trainee.optimizer,
        trainee.model,
        algorithm,
        topology=graph,
        update_in_backward=update_in_backward,
    )


def _methods(world: World) -> dict[str, Method]:
    """All methods by name, the plain local step first."""
    one_peer = topology.one_peer_exponential(world.size)
    exp2 = topology.exponential_two(world.size)
    awc, atc = "adapt_with_combine", "adapt_then_combine"
    return {
        LOCAL: lambda trainee: None,
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


def step_table(world: World, workload: Workload, aims: Sequence[Aim] = ()) -> Table:
    """A step of every method, each on a model of its own, over a single size: the model's."""

    def rival(name: str, method: Method) -> Rival:
        def prepare(nbytes: int) -> Call:
            made = trainee(world, workload)
            method(made)
            return made.step

        return Rival(name, prepare)

    rivals = [rival(name, method) for name, method in _methods(world).items()]
    note = (
        f"{workload.nbytes / 4e6:.3g} million parameters in float32, SGD with momentum. Before the "
        "clock starts each method makes a step that does not count, so that what reaches over from "
        "step to step is paid for."
    )
    return Table(
        f"step_{workload.key}",
        f"a step of {workload.title}",
        [workload.nbytes],
        rivals,
        size_is="model",
        aims=aims,
        lead=1,
        samples=workload.samples * world.size,
        note=note,
    )
