"""Averages, distances, verbs and mistakes on sharded replicas, beside methods of their own laws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncddp as bf
from tests.sharded.method_cases import run_of
from tests.sharded.training import ADAMW, Run, by_optimizer, copies_apart, full, loss_of, spread
from tests.sharded.world import folder_of_all

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def refusal(call: Callable[[], Any]) -> str:
    """The message of the ArgumentError that a call raises."""
    try:
        call()
    except bf.ArgumentError as error:
        return str(error)
    return "nothing was refused"


def apart(run: Run) -> tuple[nn.Module, nn.Module]:
    """Sharded and whole models, different on each replica."""
    sharded, whole = run.sharded(), run.make()
    for model in (sharded, whole):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + run.replica)
    return sharded, whole


# averages and distances


@case
def averages() -> list[float]:
    """The average, the distance and a broadcast are those of whole replicas."""
    found = []
    for layout in ("uneven", "tp"):
        run = run_of(layout)
        sharded, whole = apart(run)
        own = [full(one).detach().clone() for one in sharded.parameters()]
        distance = bf.consensus_distance(sharded, mesh=run.replicas)
        with bf.replicas(run.replicas):
            expected = bf.consensus_distance(whole)
            with bf.average_model(whole), bf.average_model(sharded):
                found.append(run.difference(sharded, whole))
        with (
            bf.average_model(whole, mesh=run.replicas),
            bf.average_model(sharded, mesh=run.replicas),
        ):
            found.append(run.difference(sharded, whole))
        pairs = zip(own, sharded.parameters(), strict=True)
        found.append(max(float((one - full(other).detach()).abs().max()) for one, other in pairs))
        found.append(abs(distance - expected) if expected > 0.1 else 1.0)
        bf.broadcast_parameters(sharded, 1, mesh=run.replicas)
        bf.broadcast_parameters(whole, 1, mesh=run.replicas)
        found += [run.difference(sharded, whole), spread(run, sharded)]
    return found


@case
def average_after_evaluation() -> list[bool]:
    """What FSDP2 has gathered before is gathered anew inside of the block, and after it."""
    run = run_of("uneven")
    model, x = apart(run)[0], torch.ones(2, 6, dtype=torch.float64)
    own = model(x).detach().clone()
    with bf.average_model(model, mesh=run.replicas):
        averaged = model(x).detach().clone()
    with bf.replicas(run.replicas):
        outputs = bf.allgather(averaged[None])
    return [
        torch.equal(model(x).detach(), own),
        not torch.equal(averaged, own),
        torch.equal(outputs[0], outputs[1]),
    ]


@case
def published_average() -> float:
    """One rank of each column takes what the others publish, with ``wait=False``."""
    run = run_of("uneven")
    model = apart(run)[0]
    wrapped = bf.DistributedOptimizer(
        ADAMW(model.parameters()), model, "win_put", mesh=run.replicas, broadcast=False
    )
    bf.barrier()
    with bf.average_model(model, wait=False, mesh=run.replicas) as averaged:
        mine = [full(one).detach().clone() for one in averaged.parameters()]
    bf.barrier()
    wrapped.close()
    start = [full(one).detach() / (1.0 + run.replica) for one in model.parameters()]
    return max(float((a - 1.5 * b).abs().max()) for a, b in zip(mine, start, strict=True))


@case
def world_of_replicas() -> list[Any]:
    """Verbs, topologies and windows of a column never meet those of another."""
    run = run_of("uneven")
    column = run.mesh.get_local_rank("shard")
    with bf.replicas(run.replicas):
        bf.set_topology("ring")
        mine = torch.full((2,), 10.0 * column + bf.rank())
        mean = bf.neighbor_allreduce(mine).tolist()
        bf.win_create(mine, "column")
        bf.win_put(mine, "column")
        bf.barrier()
        read = bf.win_update("column").tolist()
        bf.win_free("column")
        inside = [bf.rank(), bf.size(), mean, read]
    with bf.replicas(run.replicas) as again, bf.replicas(run.replicas) as inner:
        same = again is inner
    return [inside, column, run.replica, same, bf.size()]


# methods with laws of their own


def trains(layout: str, name: str, **options: Any) -> dict[str, float]:
    """Losses fall, replicas stay near each other, and copies inside a replica equal."""
    run = run_of(layout)
    model, losses = run.sharded(), []
    make = options.pop("make", partial(torch.optim.SGD, lr=0.05))
    wrapped = bf.DistributedOptimizer(
        make(model.parameters()), model, name, mesh=run.replicas, **options
    )
    pair = next(run.batches(whole=False))
    for _ in range(8):
        wrapped.zero_grad()
        loss = loss_of(model, pair)
        loss.backward()
        wrapped.step()
        losses.append(float(loss))
    wrapped.conclude()
    wrapped.close()
    found = {"copies apart": copies_apart(run, model), "spread": spread(run, model)}
    means = bf.allreduce(torch.tensor([losses[0], losses[-1]]))
    return {**found, "first": float(means[0]), "last": float(means[1])}


def own_laws() -> dict[str, dict[str, Any]]:
    """Methods that depend on chance or on blocks, and their options."""
    return {
        "win_put": {},
        "choco_sgd": {},
        "pull_get": {},
        "push_sum": {},
        "overlap_sgp": {},
        "ad_psgd": {},
        "a2cid2": {},
        "async_model_average": {},
        "moniqua": {},
        "bytegrad": {},
        "power_gossip": {},
        "demo": {"make": partial(torch.optim.SGD, lr=0.005)},
        "sparse_loco": {"communication_interval": 3},
        "qadam": {"make": partial(bf.QAdamOptimizer, lr=0.02, warmup_steps=3)},
        "gradient_allreduce": {"compression": "power_sgd"},
    }


OWN_LAWS = {
    f"{layout}: {name}": partial(trains, layout, name, **options)
    for layout in ("uneven", "tp")
    for name, options in own_laws().items()
}


@case
def switch() -> float:
    """``switch_to`` averages the replicas, and goes on with another method."""

    def train(model: nn.Module, batches: Iterator[Any], mesh: DeviceMesh | None) -> None:
        wrapped = bf.DistributedOptimizer(
            ADAMW(model.parameters()), model, "adapt_with_combine", mesh=mesh
        )
        for number, pair in enumerate(batches):
            if number == 3:
                wrapped.switch_to("gradient_allreduce")
            if number == 5:
                wrapped.switch_to("diloco", communication_interval=2)
            wrapped.zero_grad()
            loss_of(model, pair).backward()
            wrapped.step()

    run = run_of("uneven")
    return run.difference(*run.train(train))


@case
def join() -> list[float]:
    """Replicas with batches of different number: who is done takes part for the others."""

    def train(
        model: nn.Module, batches: Iterator[Any], mesh: DeviceMesh | None, algorithm: str
    ) -> None:
        wrapped = bf.DistributedOptimizer(ADAMW(model.parameters()), model, algorithm, mesh=mesh)
        with bf.join(wrapped):
            for number, pair in enumerate(batches):
                if number < 3 + 2 * run.replica:
                    wrapped.zero_grad()
                    loss_of(model, pair).backward()
                    wrapped.step()

    run = run_of("uneven")
    names = "adapt_then_combine", "gradient_allreduce"
    return [run.difference(*run.train(partial(train, algorithm=name))) for name in names]


@case
def state_of_a_method() -> float:
    """A run goes on from the wrapper's state and the model's as if it had not stopped."""
    run, pairs = run_of("uneven"), list(run_of("uneven").batches(whole=False))

    def go(model: nn.Module, wrapped: Any, part: list[Any]) -> None:
        for pair in part:
            wrapped.zero_grad()
            loss_of(model, pair).backward()
            wrapped.step()

    def wrap(model: nn.Module) -> Any:
        return bf.DistributedOptimizer(
            ADAMW(model.parameters()),
            model,
            "gradient_tracking",
            mesh=run.replicas,
            broadcast=False,
        )

    model = run.sharded()
    wrapped = wrap(model)
    go(model, wrapped, pairs[:4])
    other = run.sharded()
    other.load_state_dict(model.state_dict())
    resumed = wrap(other)
    resumed.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    go(model, wrapped, pairs[4:])
    go(other, resumed, pairs[4:])
    both = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((full(a) - full(b)).detach().abs().max()) for a, b in both)


@case
def broadcast_of_a_state() -> list[float]:
    """Replicas whose optimizers have states of their own, or none yet, take replica 1's."""
    found = []
    for layout in ("uneven", "tp"):
        run = run_of(layout)
        model = run.sharded()
        optimizer = ADAMW(model.parameters(), lr=0.1 * (1 + run.replica))
        if run.replica == 1:
            loss_of(model, next(run.batches(whole=False))).backward()
            optimizer.step()
        bf.broadcast_optimizer_state(optimizer, 1, mesh=run.replicas)
        moments = [optimizer.state[one]["exp_avg"] for one in model.parameters()]
        with bf.replicas(run.replicas):
            found.append(bf.consensus_distance([full(one) for one in moments]))
        found.append(float(optimizer.param_groups[0]["lr"] != 0.2))
        pairs = zip(moments, model.parameters(), strict=True)
        found += [float(one.shape != parameter.shape) for one, parameter in pairs]
        found.append(float(not any(full(one).any() for one in moments)))
    return found


@case
def checkpoint_of_the_average() -> list[float]:
    """Replica 0 saves the average by torch; replicas of other parts and whole models read it."""
    run, folder = run_of("uneven"), folder_of_all()
    model = apart(run)[0]
    group = run.mesh["shard"].get_group()
    with bf.average_model(model, mesh=run.replicas):
        expected = [full(one).detach().clone() for one in model.parameters()]
        if run.replica == 0:
            dcp.save(model.state_dict(), checkpoint_id=folder, process_group=group)
    bf.barrier()
    again, whole = run.sharded(), run.make()
    in_four = run.make()
    fully_shard(in_four, mesh=init_device_mesh("cpu", (4,)))
    found = []
    for one in (again, whole, in_four):
        state = one.state_dict()
        dcp.load(state, checkpoint_id=folder)
        one.load_state_dict(state)
        pairs = zip(expected, one.parameters(), strict=True)
        found.append(max(float((a - full(b).detach()).abs().max()) for a, b in pairs))
    return found


# mistakes


@case
def mistakes() -> dict[str, str]:
    run = run_of("uneven")
    model, hybrid, crossed = run.sharded(), run.make(), run.make()
    fully_shard(hybrid, mesh=run.mesh)
    fully_shard(crossed, mesh=run.replicas)
    make = partial(bf.DistributedOptimizer, ADAMW(model.parameters()), model)
    over_all = partial(bf.DistributedOptimizer, ADAMW(hybrid.parameters()), hybrid)
    across = partial(bf.DistributedOptimizer, ADAMW(crossed.parameters()), crossed)
    return {
        "no mesh": refusal(make),
        "average without mesh": refusal(lambda: bf.average_model(model).__enter__()),
        "distance without mesh": refusal(lambda: bf.consensus_distance(model)),
        "two dimensions": refusal(lambda: make(mesh=run.mesh)),
        "no mesh at all": refusal(lambda: make(mesh="replica")),
        "sharded over replicas": refusal(lambda: over_all(mesh=run.replicas)),
        "another dimension": refusal(lambda: across(mesh=run.replicas)),
        "autotune": refusal(lambda: make(mesh=run.replicas, autotune=True)),
        "clock": refusal(
            lambda: make("async_model_average", mesh=run.replicas, sync_interval_ms=5)
        ),
        "fused": refusal(lambda: bf.fuse_optimizer(ADAMW(model.parameters()))),
        "checkpoint": refusal(lambda: bf.save_checkpoint("folder", model, step=1)),
        "state": refusal(lambda: bf.broadcast_optimizer_state(ADAMW(model.parameters()))),
    }


@case
def settings_that_differ() -> str:
    """Columns that would average by different methods are told so, on all ranks."""
    run = run_of("uneven")
    model, column = run.sharded(), run.mesh.get_local_rank("shard")
    try:
        by_optimizer(model, iter(()), run.replicas, algorithm=("local_sgd", "diloco")[column])
    except bf.MismatchError as error:
        return str(error)
    return "nothing differed"


TOOLS = list(CASES)
CASES.update(OWN_LAWS)
