"""Monitors and timelines of sharded replicas, beside those of whole ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import asyncddp as bf
from tests.sharded.method_cases import run_of
from tests.sharded.training import ADAMW, loss_of
from tests.support.timelines import read, spans

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def watched(
    model: nn.Module,
    batches: Iterator[Any],
    mesh: DeviceMesh | None,
    *,
    seen: list[dict[str, Any]],
    in_module: bool,
    consensus: str,
) -> None:
    """Train with a monitor; ``seen`` has what it writes."""
    if in_module:
        wrapped = bf.DecentralizedDataParallel(
            model, lambda named: ADAMW([one for _, one in named]), mesh=mesh
        )
    else:
        wrapped = bf.DistributedOptimizer(
            ADAMW(model.parameters()), model, "adapt_with_combine", mesh=mesh
        )
    with bf.monitor(wrapped, every=2, to=seen.append, consensus=consensus):
        for pair in batches:
            if not in_module:
                wrapped.zero_grad()
            loss_of(wrapped if in_module else model, pair).backward()
            if not in_module:
                wrapped.step()
    wrapped.close()


def records(layout: str, consensus: str, *, in_module: bool) -> list[list[list[Any]]]:
    """What is written of sharded replicas, and of whole ones: numbers of replicas and figures."""
    run, found = run_of(layout), []
    for model in (run.sharded(), run.make()):
        seen: list[dict[str, Any]] = []
        train = partial(watched, seen=seen, in_module=in_module, consensus=consensus)
        if not found:
            train(model, run.batches(whole=False), run.replicas)
        else:
            with bf.replicas(run.replicas):
                train(model, run.batches(whole=True), None)
        keys = "step", "rank", "consensus_distance", "gradient_norm"
        found.append([[one[key] for key in keys] for one in seen])
    return found


for layout in ("uneven", "tp"):
    for in_module in (False, True):
        name = f"{layout}, {'module' if in_module else 'optimizer'}"
        CASES[f"exact: {name}"] = partial(records, layout, "exact", in_module=in_module)
EXACT = list(CASES)
CASES["projected"] = partial(records, "uneven", "projection", in_module=False)


@case
def timeline() -> list[Any]:
    """Steps, averages and messages of a column are in the rank's file, by ranks of the world."""
    run = run_of("uneven")
    train = partial(watched, seen=[], in_module=False, consensus="projection")
    train(run.sharded(), run.batches(whole=False), run.replicas)
    tracer = bf.current().tracer
    tracer.flush()
    events = read(
        Path(os.environ["ASYNCDDP_TIMELINE"].replace("{rank}", str(bf.rank()))), ended=False
    )
    peers = {one["args"]["peer"] for one in spans(events, "transfer") if "peer" in one["args"]}
    mixed = {peer for one in spans(events, "mix") for peer in one["args"]["peers"]}
    waited = {peer for one in spans(events, "wait") for peer in one["args"]["for"]}
    kinds = [bool(spans(events, kind)) for kind in ("step", "forward", "backward")]
    return [sorted(peers), sorted(mixed), sorted(waited), kinds]
