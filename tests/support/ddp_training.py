"""Training by DistributedDataParallel on ranks of a world, and the same in one process."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import asyncddp as bf

__all__ = [
    "BACKENDS",
    "Replica",
    "Simulation",
    "flat",
    "grouped",
    "make_ddp",
    "make_model",
    "recorded",
]

BACKENDS = ("gloo",)
"""Backends of torch.distributed on which DDP's hooks are tested."""

SMALL = 0.0005
"""Megabytes of a bucket, so that the small model has several."""

LR = 0.05

_groups: deque[dist.ProcessGroup] = deque(maxlen=4)


def grouped(case: Callable) -> Callable:
    """Run a case in a process group of all ranks: ``case(backend, folder, …)``, for a folder.

    What the case has made is gone before the group is destroyed: a DistributedDataParallel that had
    the last reference to a group of gloo could wait for its threads, and these for Python. The
    group itself is kept for a while: a callback on one of those threads that had the last
    reference would wait for its own thread, which ends the process.
    """

    @functools.wraps(case)
    def run(backend, folder, *args):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if backend not in dist.Backend.backend_list:
            importlib.import_module("asyncddp.integrations.torch_distributed")
        dist.init_process_group(
            backend,
            init_method=f"file://{Path(folder, 'store')}",
            rank=bf.rank(),
            world_size=bf.size(),
            timeout=datetime.timedelta(seconds=60),
        )
        _groups.append(dist.distributed_c10d._get_default_group())
        try:
            return case(*args)
        finally:
            gc.collect()
            dist.destroy_process_group()

    return run


def make_model() -> torch.nn.Sequential:
    """A small model, the same on all ranks."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))


def make_ddp(bucket_cap_mb: float = SMALL, **options) -> DistributedDataParallel:
    """The model in DDP, in several buckets."""
    return DistributedDataParallel(make_model(), bucket_cap_mb=bucket_cap_mb, **options)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own data in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 6, generator=generator)
    return x, torch.sin(3 * x[:, :3]) + rank


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """A rank's loss in a step."""
    x, y = batch_of(rank, step)
    return (model(x) - y).square().mean()


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters of a model as one tensor."""
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


class Replica:
    """One rank's model with its optimizer, as it is trained through DDP."""

    def __init__(self, ddp: torch.nn.Module, make_optimizer=None) -> None:
        self.ddp = ddp
        made = make_optimizer or (lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5))
        self.optimizer = made(ddp.parameters())

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        """Train from one step to before another; gives the parameters after each."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.ddp, dist.get_rank(), step).backward()
            self.optimizer.step()
            found.append(flat(self.ddp))
        return found


Layout = dict[int, list[int]]


def recorded(hook: Callable, ddp: DistributedDataParallel, layouts: list[Layout]) -> Callable:
    """A hook that notes, for each step, which parameters each bucket has."""
    positions = {id(one): place for place, one in enumerate(ddp.parameters())}

    def noting(state, bucket):
        if bucket.index() == 0:
            layouts.append({})
        layouts[-1][bucket.index()] = [positions[id(one)] for one in bucket.parameters()]
        return hook(state, bucket)

    return noting


class Simulation:
    """The models of all ranks in this process, trained step by step.

    Args:
        size: How many.
        average: ``average(step, gradients)`` gives each rank's gradients, flat, from all ranks'.
        mix: ``mix(step, parameters)`` gives each rank's parameters from all, before the update.
    """

    def __init__(self, size, average=None, mix=None) -> None:
        self.models = [make_model() for _ in range(size)]
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5) for model in self.models
        ]
        self.average, self.mix = average, mix

    def train(self, first: int, last: int) -> list[list[torch.Tensor]]:
        """Train; gives all ranks' parameters after each step."""
        found = []
        for step in range(first, last):
            for rank, model in enumerate(self.models):
                self.optimizers[rank].zero_grad()
                loss_of(model, rank, step).backward()
            if self.average is not None:
                rows = [[one.grad.reshape(-1) for one in m.parameters()] for m in self.models]
                self._set("grad", self.average(step, [torch.cat(row) for row in rows]))
            if self.mix is not None:
                self._set("data", self.mix(step, [flat(model) for model in self.models]))
            for optimizer in self.optimizers:
                optimizer.step()
            found.append([flat(model) for model in self.models])
        return found

    def _set(self, what: str, rows: list[torch.Tensor]) -> None:
        for model, row in zip(self.models, rows, strict=True):
            parameters = list(model.parameters())
            parts = row.split([one.numel() for one in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                getattr(parameter, what).copy_(part.view_as(parameter))
