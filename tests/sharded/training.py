"""Training of a small model on replicas that are sharded, and unsharded on the same data.

A world of processes has replicas as rows and parts of the model as columns. The reference of a
sharded run is the same method on as many whole replicas, in float64, by the ranks of a column.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import asyncddp as bf

STEPS = 7
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
BATCH = 4  # of a replica: each of its data-parallel ranks has an equal part


class Net(nn.Module):
    """Two blocks and a head; FSDP2 wraps each, tensor parallelism splits the blocks.

    Args:
        even: Whether two ranks divide each parameter evenly. Else the head has 5 rows, and a scale
            is smaller than the mesh, so that a shard is empty.
    """

    def __init__(self, *, even: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4 if even else 5)
        self.scale = nn.Parameter(torch.ones(2 if even else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(x)))) * self.scale[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_net(*, even: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Net(even=even).double()


@dataclass(frozen=True)
class Layout:
    """A mesh of processes, and what shards a model on it.

    Attributes:
        dims: Sizes by name, "replica" first.
        even: Whether parameters divide evenly.
    """

    dims: dict[str, int]
    even: bool = False
    shard_options: dict[str, Any] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        return self.dims["replica"]

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", tuple(self.dims.values()), mesh_dim_names=tuple(self.dims))

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if "tp" in self.dims:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in (model.first, model.second):
                parallelize_module(block, mesh["tp"], plan)
        if "shard" in self.dims:
            for part in (model.first, model.second, model):
                fully_shard(part, mesh=mesh["shard"], **self.shard_options)
        return model

    def own_part(self, batch: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        parts = self.dims.get("shard", 1)
        return batch.chunk(parts)[mesh.get_local_rank("shard") if parts > 1 else 0]


LAYOUTS = {
    "even": Layout({"replica": 2, "shard": 2}, even=True),
    "uneven": Layout({"replica": 2, "shard": 2}),
    "tp": Layout({"replica": 2, "tp": 2}),
    "both": Layout({"replica": 2, "shard": 2, "tp": 2}),
    "four": Layout({"replica": 4, "shard": 2}),
}


def batch(step: int, replica: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    make = partial(torch.randn, generator=generator, dtype=torch.float64)
    return make(BATCH, 6), make(BATCH, outputs)


@dataclass
class Run:
    """A world, its mesh, and the models that were trained on it.

    Attributes:
        layout: The layout.
        mesh: The mesh of all ranks.
    """

    layout: Layout
    mesh: DeviceMesh
    make: Callable[[], nn.Module]

    @classmethod
    def of(cls, layout: Layout) -> Run:
        return cls(layout, layout.mesh(), partial(make_net, even=layout.even))

    @property
    def replicas(self) -> DeviceMesh:
        return self.mesh["replica"]

    @property
    def replica(self) -> int:
        return int(self.mesh.get_local_rank("replica"))

    def sharded(self) -> nn.Module:
        return self.layout.shard(self.make(), self.mesh)

    def batches(self, *, whole: bool, steps: int = STEPS) -> Iterator[Any]:
        for step in range(steps):
            pair = batch(step, self.replica, 4 if self.layout.even else 5)
            yield pair if whole else tuple(self.layout.own_part(one, self.mesh) for one in pair)

    def train(
        self, train: Callable[[nn.Module, Iterator[Any], DeviceMesh | None], Any]
    ) -> tuple[nn.Module, nn.Module]:
        """Train sharded and whole; return both models."""
        sharded = self.sharded()
        train(sharded, self.batches(whole=False), self.replicas)
        return sharded, self.train_whole(train)

    def train_whole(self, train: Callable[..., Any]) -> nn.Module:
        whole = self.make()
        with bf.replicas(self.replicas):
            train(whole, self.batches(whole=True), None)
        return whole

    def difference(self, sharded: nn.Module, whole: nn.Module) -> float:
        """The largest difference of a parameter on this rank; each rank has the same shape."""
        pairs = zip(sharded.named_parameters(), whole.named_parameters(), strict=True)
        found = [0.0]
        for (name, one), (other, expected) in pairs:
            assert name == other
            assert one.shape == expected.shape
            found.append(float((full(one) - expected).detach().abs().max()))
        return max(found)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor of its parts; collective inside of a replica."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def by_optimizer(
    model: nn.Module,
    batches: Iterator[Any],
    mesh: DeviceMesh | None,
    *,
    make: Callable[..., torch.optim.Optimizer] = ADAMW,
    around_step: Callable[[nn.Module, Any], None] | None = None,
    force_barrier: bool = False,
    **arguments: Any,
) -> Any:
    """Train with a ``DistributedOptimizer`` around an optimizer; return the wrapper."""
    optimizer = bf.DistributedOptimizer(make(model.parameters()), model, mesh=mesh, **arguments)
    optimizer.force_barrier = force_barrier
    for pair in batches:
        optimizer.zero_grad()
        loss_of(model, pair).backward()
        if around_step is not None:
            around_step(model, optimizer)
        optimizer.step()
    optimizer.conclude()
    return optimizer


def spread(run: Run, model: nn.Module) -> float:
    """How far the replicas' models are from each other: the law is empty where they are equal."""
    copied = copy.deepcopy([full(one).detach() for one in model.parameters()])
    with bf.replicas(run.replicas):
        return bf.consensus_distance(copied)


def copies_apart(run: Run, model: nn.Module) -> float:
    """The largest difference inside a replica of parts that several of its ranks hold."""
    if "tp" not in run.layout.dims:
        return 0.0
    group = run.mesh["tp"].get_group()
    found = [0.0]
    for parameter in model.parameters():
        sharded_by_tp = isinstance(parameter, DTensor) and any(
            name == "tp" and not placement.is_replicate()
            for name, placement in zip(
                parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True
            )
        )
        if not sharded_by_tp:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            least, most = own.detach().clone(), own.detach().clone()
            dist.all_reduce(least, dist.ReduceOp.MIN, group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            found += (most - least).flatten().tolist()
    return max(found)
