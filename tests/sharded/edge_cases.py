"""Wrappers, tools and mistakes on sharded replicas: what is not one method's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import asyncddp as bf
from asyncddp.tensors import fsdp_params
from tests.sharded.method_cases import run_of
from tests.sharded.training import (
    ADAMW,
    LAYOUTS,
    Run,
    by_optimizer,
    copies_apart,
    full,
    loss_of,
)

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def difference(run: Run, **arguments: Any) -> float:
    sharded, whole = run.train(partial(by_optimizer, **arguments))
    return run.difference(sharded, whole)


# wrappers and loops


def by_module(
    model: nn.Module, batches: Iterator[Any], mesh: DeviceMesh | None, **arguments: Any
) -> Any:
    """Train with a ``DecentralizedDataParallel``."""

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return ADAMW([one for _, one in named])

    ddp = bf.DecentralizedDataParallel(model, make, mesh=mesh, **arguments)
    for pair in batches:
        loss_of(ddp, pair).backward()
    ddp.close()
    return ddp


@case
def module_wrapper() -> list[float]:
    run, found = run_of("uneven"), []
    for arguments in (
        {},
        {"param_as_bucket_view": False},
        {"bucket_size_in_mb": 1e-4},
        {"grad_clip_norm": 0.05},
        {"algorithm": "gradient_tracking"},
    ):
        sharded, whole = run.train(partial(by_module, topology="ring", **arguments))
        found.append(run.difference(sharded, whole))
    return found


@case
def module_wrapper_of_tensor_parallel() -> list[float]:
    run = run_of("tp")
    sharded, whole = run.train(partial(by_module, topology="ring"))
    return [run.difference(sharded, whole), copies_apart(run, sharded)]


@case
def evaluation_of_the_average() -> list[bool]:
    """``eval()`` shows the average, also where FSDP2 had gathered before; ``train()`` restores."""
    run = run_of("uneven")
    model, x = run.sharded(), torch.ones(2, 6, dtype=torch.float64)
    ddp = bf.DecentralizedDataParallel(
        model, lambda named: ADAMW([p for _, p in named]), mesh=run.replicas
    )
    for pair in run.batches(whole=False):
        loss_of(ddp, pair).backward()
    ddp.eval(average=False)
    own = ddp(x).detach().clone()
    ddp.eval()
    averaged = ddp(x).detach().clone()
    ddp.train()
    again = ddp(x).detach()
    return [not torch.equal(own, averaged), torch.equal(own, again)]


@case
def micro_batches() -> float:
    """Gradients stay unreduced until the last pass of a step."""

    def train(model: nn.Module, batches: Iterator[Any], mesh: DeviceMesh | None) -> None:
        wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, mesh=mesh)
        for pair in batches:
            wrapped.zero_grad()
            for number, part in enumerate(zip(*(one.chunk(2) for one in pair), strict=True)):
                if mesh is not None:
                    model.set_requires_gradient_sync(number == 1)
                (loss_of(model, part) / 2).backward()
            wrapped.step()

    return run_of("uneven").difference(*run_of("uneven").train(train))


@case
def gradients_of_two_passes() -> float:
    run = run_of("uneven")
    return difference(run, algorithm="gradient_allreduce", num_steps_per_communication=2)


@case
def clipping() -> float:
    def clip(model: nn.Module, optimizer: Any) -> None:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    found = [
        difference(run_of("uneven"), algorithm=name, around_step=clip)
        for name in ("adapt_then_combine", "gradient_allreduce")
    ]
    return max(found)


@case
def update_in_backward() -> float:
    return difference(run_of("uneven"), update_in_backward=True, bucket_size_in_mb=1e-4)


@case
def small_buckets_in_pieces() -> float:
    run = run_of("uneven")
    return difference(run, bucket_size_in_mb=1e-4, communication_buffer_in_mb=0.25)


# models


@case
def parameters_that_are_not_reshard() -> float:
    run = Run.of(replace(LAYOUTS["uneven"], shard_options={"reshard_after_forward": False}))
    return difference(run, algorithm="adapt_with_combine")


@case
def frozen_and_tied() -> list[float]:
    def make() -> nn.Module:
        model = run_of("uneven").make()
        model.first.up.weight.requires_grad_(False)
        model.second.down.weight = model.second.up.weight = nn.Parameter(
            model.second.up.weight.detach()[:6, :6].clone()
        )
        model.second.up.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        return model

    run = replace(run_of("uneven"), make=make)
    found = [difference(run, algorithm=one) for one in ("adapt_then_combine", "diloco")]
    sharded, _ = run.train(partial(by_optimizer, algorithm="adapt_then_combine"))
    moved = (full(sharded.first.up.weight) - make().first.up.weight).abs().max()
    return [*found, float(moved)]


@case
def half_precision_beside_whole_replicas() -> float:
    """FSDP2 computes in bfloat16; parameters and averages stay in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = Run.of(replace(LAYOUTS["uneven"], shard_options={"mp_policy": policy}))
    run = replace(run, make=lambda: run_of("uneven").make().float())

    def train(model: nn.Module, batches: Iterator[Any], mesh: DeviceMesh | None) -> None:
        wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, mesh=mesh)
        for pair in batches:
            wrapped.zero_grad()
            if mesh is not None:
                loss_of(model, tuple(one.bfloat16() for one in pair)).backward()
            else:
                of_parts = [
                    gradients_in_half(model, part)
                    for part in zip(*(one.bfloat16().chunk(2) for one in pair), strict=True)
                ]
                for parameter, *both in zip(model.parameters(), *of_parts, strict=True):
                    parameter.grad = sum(both) / 2
            wrapped.step()

    return run.difference(*run.train(train))


def gradients_in_half(model: nn.Module, pair: Any) -> list[torch.Tensor]:
    half = copy.deepcopy(model).bfloat16()
    loss_of(half, pair).backward()
    return [one.grad.float() for one in half.parameters()]


@case
def offloaded_shards() -> float:
    """Parameters that FSDP2 keeps on the host."""
    offload = CPUOffloadPolicy(pin_memory=False)
    run = Run.of(replace(LAYOUTS["uneven"], shard_options={"offload_policy": offload}))
    return difference(run, algorithm="adapt_with_combine")


@case
def values_given_anew() -> float:
    """A state that is loaded between steps is what the next step averages."""

    def train(model: nn.Module, batches: Iterator[Any], mesh: DeviceMesh | None) -> None:
        wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, mesh=mesh)
        saved = {name: one.detach().clone() for name, one in model.state_dict().items()}
        for number, pair in enumerate(batches):
            if number == 3:
                model.load_state_dict(saved)
            wrapped.zero_grad()
            loss_of(model, pair).backward()
            wrapped.step()

    return run_of("uneven").difference(*run_of("uneven").train(train))


@contextmanager
def unknown_names() -> Iterator[None]:
    """An FSDP2 that keeps its shards under other names."""
    before, fsdp_params._FLAT = fsdp_params._FLAT, "_another_name"
    try:
        yield
    finally:
        fsdp_params._FLAT = before


@case
def shards_that_are_copied() -> list[float]:
    """Where FSDP2's names are not known, shards are copied to buckets and back."""
    names = ("adapt_then_combine", "adapt_with_combine", "diloco", "gradient_tracking")
    names += ("exact_diffusion", "push_sum", "async_model_average", "gradient_allreduce")
    run, found = run_of("uneven"), []
    with unknown_names():
        for name in names:
            found.append(difference(run, algorithm=name, force_barrier=True))
        sharded, whole = run.train(partial(by_module, topology="ring"))
        found.append(run.difference(sharded, whole))
    return found


@case
def shards_lie_in_buckets() -> bool:
    """FSDP2 gathers from the bucket: nothing is copied."""
    run = run_of("uneven")
    model = run.sharded()
    wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, mesh=run.replicas)
    flat = wrapped._phase.averager.buckets[0].flat
    start, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    places = [fsdp_params.padded_shard(one).data_ptr() for one in model.parameters()]
    return all(start <= place < end for place in places)
