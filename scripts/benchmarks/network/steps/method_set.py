"""Training steps over a network by every method, and their communication alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp import topology
from benchmarks.network.steps.method_names import (
    ATC,
    ATC_BACKWARD,
    AWC,
    CENTRAL,
    DDP,
    GLOO_SUM,
    LOCAL,
    MPI_AFTER,
    MPI_SUM,
    ONE_PEER,
    OUR_MIX,
    OUR_SUM,
)
from benchmarks.network.steps.synthetic_model import SyntheticWorkload, build
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, TimingTable

__all__ = ["MethodSet"]

_RATE = 1e-3
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _TrainingModel:
    """Model with its data and its plain optimizer."""

    model: torch.nn.Module
    batch: torch.Tensor
    optimizer: torch.optim.Optimizer

    def step(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        average: Callable[[], None] = lambda: None,
    ) -> Step:
        """zero_grad, forward, backward, whatever averages gradients, step."""

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(self.batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            average()
            optimizer.step()
            return loss

        return step


class MethodSet:
    """Set of all methods on the ranks of one run, each with its own model.

    Args:
        world: The ranks.
        workload: What each computes.

    Attributes:
        steps: The steps that have been prepared, by method.
        wrappers: Our own optimizers among them, which know what they sent.
    """

    def __init__(self, world: RankGroup, workload: SyntheticWorkload) -> None:
        self.world, self.workload = world, workload
        self.steps: dict[str, Step] = {}
        self.wrappers: dict[str, bf.DistributedOptimizer] = {}
        self._schedule = topology.one_peer_exponential(world.size)

    def training(self) -> TimingTable:
        """A step of every method, over a single size: the model's."""
        makers: dict[str, Callable[[_TrainingModel], Step]] = {
            LOCAL: lambda own: own.step(own.model, own.optimizer),
            DDP: self._ddp,
            MPI_AFTER: self._mpi,
            CENTRAL: lambda own: self._ours(own, CENTRAL, "gradient_allreduce"),
            AWC: lambda own: self._ours(own, AWC, "adapt_with_combine"),
            ATC: lambda own: self._ours(own, ATC, "adapt_then_combine"),
            ATC_BACKWARD: lambda own: self._ours(own, ATC_BACKWARD, "adapt_then_combine"),
        }
        rivals = [self._rival(name, maker) for name, maker in makers.items()]
        return TimingTable("network", "a step over the network", [self.workload.nbytes], rivals)

    def alone(self) -> TimingTable:
        """The communication of the methods without any computing, on one flat tensor."""
        bf.set_topology(self._schedule)
        rivals = [
            Rival(GLOO_SUM, self._gloo_sum),
            Rival(MPI_SUM, self._mpi_sum),
            Rival(OUR_SUM, lambda nbytes: self._ours_alone(lambda x, k: bf.allreduce_(x))),
            Rival(
                OUR_MIX,
                lambda nbytes: self._ours_alone(lambda x, k: bf.neighbor_allreduce_(x, round=k)),
            ),
        ]
        return TimingTable("network_alone", "communication alone", [self.workload.nbytes], rivals)

    # steps

    def _rival(self, name: str, maker: Callable[[_TrainingModel], Step]) -> Rival:
        def prepare(nbytes: int) -> Call:
            model, batch = build(self.workload, self.world.rank)
            own = _TrainingModel(model, batch, torch.optim.SGD(model.parameters(), lr=_RATE))
            step = self.steps[name] = maker(own)
            return lambda number: step()

        return Rival(name, prepare)

    def _gloo(self) -> None:
        if self.world.gloo is not None:
            raise RivalUnavailableError(self.world.gloo)

    def _ddp(self, own: _TrainingModel) -> Step:
        self._gloo()
        cap = self.workload.bucket_mb
        model = torch.nn.parallel.DistributedDataParallel(own.model, bucket_cap_mb=cap)
        return own.step(model, own.optimizer)

    def _mpi(self, own: _TrainingModel) -> Step:
        """Flatten all gradients to one tensor, so that one Allreduce averages them."""
        flat, place = torch.zeros(self.workload.nbytes // 4), 0
        for parameter in own.model.parameters():
            parameter.grad = flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()

        def average() -> None:
            self.world.comm.Allreduce(MPI.IN_PLACE, flat.numpy(), MPI.SUM)
            flat.div_(self.world.size)

        return own.step(own.model, own.optimizer, average)

    def _ours(self, own: _TrainingModel, name: str, algorithm: str) -> Step:
        wrapper = self.wrappers[name] = bf.DistributedOptimizer(
            own.optimizer,
            own.model,
            algorithm,
            topology=self._schedule if name in ONE_PEER else None,
            bucket_size_in_mb=self.workload.bucket_mb,
            update_in_backward=name == ATC_BACKWARD,
        )
        return own.step(own.model, wrapper)

    # communication alone

    def _tensor(self) -> torch.Tensor:
        return torch.ones(self.workload.nbytes // 4)

    def _gloo_sum(self, nbytes: int) -> Call:
        self._gloo()
        own = self._tensor()

        def call(number: int) -> torch.Tensor:
            torch.distributed.all_reduce(own)
            return own.div_(self.world.size)

        return call

    def _mpi_sum(self, nbytes: int) -> Call:
        own = self._tensor()

        def call(number: int) -> torch.Tensor:
            self.world.comm.Allreduce(MPI.IN_PLACE, own.numpy(), MPI.SUM)
            return own.div_(self.world.size)

        return call

    def _ours_alone(self, verb: Callable[[torch.Tensor, int], torch.Tensor]) -> Call:
        own = self._tensor()
        return lambda number: verb(own, number)
