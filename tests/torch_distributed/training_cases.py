"""What PyTorch builds on process groups, run on gloo and on asyncddp in the same ranks.

Each case trains or moves something with the default group, whatever its backend, and returns
tensors. With two ranks a sum has one order, so that both backends must give the same bits; with
more of them the results agree to 1e-6.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import asyncddp.integrations.torch_distributed  # noqa: F401 - registers the backend
from tests.torch_distributed import communication_cases  # noqa: F401 - registers its cases
from tests.torch_distributed.case_registry import CASES, case

TIMEOUT = timedelta(seconds=60)
STEPS = 3
TOLERANCES = {"ddp_compressing_hooks": 3e-3}  # of sums that are rounded to half precision


class Net(nn.Module):
    """Layers, a norm with buffers, and one branch that not every batch uses."""

    def __init__(self, *, branch: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 40), nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 3)
        self.branch = nn.Linear(40, 3) if branch else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.branch is not None and x.sum() > 0:
            return self.branch(hidden)
        return self.last(hidden)


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    return [
        (torch.randn(8, 12, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return model()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int = STEPS
) -> list[torch.Tensor]:
    losses = []
    for x, y in batches(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_ddp(*, branch: bool = False, hook: Any = None, **modes: Any) -> list[torch.Tensor]:
    model = DistributedDataParallel(
        seeded(lambda: Net(branch=branch)), bucket_cap_mb=0.002, **modes
    )
    if hook is not None:
        state, function = hook()
        model.register_comm_hook(state, function)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 2 * STEPS)
    return [*losses, *(value.detach() for value in model.state_dict().values())]


@case
def ddp() -> list[torch.Tensor]:
    return train_ddp()


@case
def ddp_static_graph() -> list[torch.Tensor]:
    return train_ddp(static_graph=True)


@case
def ddp_unused_parameters() -> list[torch.Tensor]:
    return train_ddp(branch=True, find_unused_parameters=True)


@case
def ddp_views() -> list[torch.Tensor]:
    return train_ddp(gradient_as_bucket_view=True)


@case
def ddp_hook() -> list[torch.Tensor]:
    return train_ddp(hook=lambda: (None, default_hooks.allreduce_hook))


@case
def ddp_compressing_hooks() -> list[torch.Tensor]:
    def power() -> Any:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        return state, powerSGD_hook.powerSGD_hook

    return [
        *train_ddp(hook=lambda: (None, default_hooks.fp16_compress_hook)),
        *train_ddp(hook=power),
    ]


@case
def ddp_no_sync() -> list[torch.Tensor]:
    model = DistributedDataParallel(seeded(Net))
    (x, y), (x2, y2) = batches(2)
    with model.no_sync():
        nn.functional.cross_entropy(model(x), y).backward()
    nn.functional.cross_entropy(model(x2), y2).backward()
    return [p.grad for p in model.parameters()]


@case
def join_of_uneven_inputs() -> list[torch.Tensor]:
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        train(model, optimizer, 2 + dist.get_rank())
    return [p.detach() for p in model.parameters()]


@case
def zero_redundancy_optimizer() -> list[torch.Tensor]:
    model = DistributedDataParallel(seeded(Net))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return [*losses, *(p.detach() for p in model.parameters())]


def fsdp2() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 3)))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return [*losses, *(p.detach().full_tensor() for p in model.parameters())]


if hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6 fails without, on any backend
    case(fsdp2)


@case
def dtensor() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    a, b = torch.randn(8, 12), torch.randn(12, 8)
    left = distribute_tensor(a, mesh, [Shard(1)])
    right = distribute_tensor(b, mesh, [Shard(0)])
    product = left @ right  # a partial sum on each rank
    assert isinstance(product, DTensor)
    rows = product.redistribute(mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    whole = columns.redistribute(mesh, [Replicate()])
    return [
        rows.full_tensor(),
        columns.full_tensor(),
        whole.to_local(),
        product.sum().full_tensor(),
    ]


@case
def saved_checkpoint() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(9)
    sharded = distribute_tensor(torch.randn(13, 4), mesh, [Shard(0)])
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    checkpoint.save({"x": sharded}, checkpoint_id=where[0])
    state = {"x": distribute_tensor(torch.zeros(13, 4), mesh, [Shard(0)])}
    checkpoint.load(state, checkpoint_id=where[0])
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(str(where[0])).glob("*"):
            path.unlink()
        for path in Path(str(where[0])).glob(".*"):
            path.unlink()
        Path(str(where[0])).rmdir()
    return [state["x"].full_tensor()]


@case
def torchmetrics_synchronisation() -> list[torch.Tensor]:
    from torchmetrics.aggregation import CatMetric, MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    accuracy, mean, every = MulticlassAccuracy(3), MeanMetric(), CatMetric()
    for x, y in batches(2 + dist.get_rank()):  # lists of uneven lengths
        accuracy.update(x[:, :3], y)
        mean.update(x)
        every.update(x[:, 0])
    return [accuracy.compute(), mean.compute(), every.compute()]


@case
def compiled_functional_collectives() -> list[torch.Tensor]:
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    @torch.compile(backend="eager")
    def both(x: torch.Tensor) -> torch.Tensor:
        return all_gather_tensor(all_reduce(2 * x, "sum", dist.group.WORLD), 0, dist.group.WORLD)

    @torch.compile(backend="eager")
    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = 3 * x
        dist.all_reduce(y)
        return y + 1

    x = torch.arange(4.0) + dist.get_rank()
    return [both(x), in_place(x)]


def run_all(backend: str, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    dist.init_process_group(backend, init_method="mpi://", timeout=TIMEOUT)
    try:
        return {name: copy.deepcopy(CASES[name]()) for name in names}
    finally:
        dist.destroy_process_group()


def compare(names: Sequence[str] = ()) -> None:
    """Run these cases, or all, on both backends, and say how they differ."""
    theirs, ours = (run_all(backend, names or list(CASES)) for backend in ("gloo", "asyncddp"))
    for name, expected in theirs.items():
        pairs = list(zip(ours[name], expected, strict=True))
        same = all(torch.equal(mine, other) for mine, other in pairs)
        tolerance = TOLERANCES.get(name, 1e-6)
        close = functools.partial(torch.allclose, rtol=10 * tolerance, atol=tolerance)
        near = all(close(mine.double(), other.double()) for mine, other in pairs)
        outcome = "equal" if same else "near" if near else "DIFFERENT"
        sys.stdout.write(f"rank {os.environ['RANK']} {name}: {outcome}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    compare(sys.argv[1:])
