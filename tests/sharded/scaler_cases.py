"""Training of sharded replicas with torch's GradScaler, beside whole replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import asyncddp as bf
from asyncddp.tensors.local_parts import shard
from tests.sharded.method_cases import run_of
from tests.sharded.training import ADAMW, Run, full, loss_of

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def by_scaler(
    model: nn.Module,
    batches: Iterator[Any],
    mesh: DeviceMesh | None,
    *,
    run: Run,
    scales: list[float],
    in_module: bool,
    **arguments: Any,
) -> Any:
    """Train with a GradScaler, of which in the third step one shard of replica 1 is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    last = run.mesh.mesh_dim_names[-1]
    spoilt = run.replica == 1 and (mesh is None or run.mesh.get_local_rank(last) == 1)
    passes = [0]

    def spoil(parameter: nn.Parameter) -> None:
        passes[0] += 1
        if spoilt and passes[0] == 3:
            shard(parameter.grad).view(-1)[0] = torch.inf

    model.first.up.weight.register_post_accumulate_grad_hook(spoil)
    if in_module:

        def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            return ADAMW([one for _, one in named])

        wrapped = bf.DecentralizedDataParallel(model, make, mesh=mesh, scaler=scaler, **arguments)
    else:
        wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, mesh=mesh, **arguments)
    for pair in batches:
        scaler.scale(loss_of(wrapped if in_module else model, pair)).backward()
        if not in_module:
            scaler.step(wrapped)
            scaler.update()
            wrapped.zero_grad()
        scales.append(scaler.get_scale())
    wrapped.close()


def beside_whole(layout: str, ways: list[tuple[bool, str]]) -> list[float]:
    """Differences of parameters and scales, and 0 where the step was left out as it had to be."""
    run, found = run_of(layout), []
    for in_module, name in ways:
        scales: list[float] = []
        train = partial(by_scaler, run=run, scales=scales, in_module=in_module, algorithm=name)
        found.append(run.difference(*run.train(train)))
        half = len(scales) // 2
        found += [abs(one - other) for one, other in zip(scales[:half], scales[half:], strict=True)]
        left_out = run.replica == 1 or name == "gradient_allreduce"
        found.append(float((scales[2] < scales[1]) != left_out))
    return found


@case
def one_shard() -> list[float]:
    """The whole replica leaves out the step, and scales the next loss by the same factor."""
    names = "adapt_with_combine", "adapt_then_combine", "gradient_allreduce"
    return beside_whole("uneven", [(way, name) for way in (False, True) for name in names])


@case
def shard_over_tensor_parallelism() -> list[float]:
    """The module wrapper agrees over meshes of which torch's scaler knows one."""
    return beside_whole("both", [(True, "adapt_with_combine"), (True, "adapt_then_combine")])


@case
def found_by_one_rank() -> list[Any]:
    """What torch's scaler has told one rank of a replica alone is an error; nothing is updated."""
    run = run_of("tp")
    model = run.sharded()
    wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, mesh=run.replicas)
    before = [full(one).detach().clone() for one in model.parameters()]
    loss_of(model, next(run.batches(whole=False))).backward()
    wrapped.found_inf = torch.tensor(float(run.mesh.get_local_rank("tp") == 1))
    try:
        wrapped.step()
    except bf.UsageError as error:
        pairs = zip(before, model.parameters(), strict=True)
        return [str(error), all(torch.equal(one, full(other).detach()) for one, other in pairs)]
    return ["nothing was raised", False]
