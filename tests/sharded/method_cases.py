"""Each method on sharded replicas beside the same method on whole ones."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from asyncddp.algorithms import ALGORITHMS
from tests.sharded.training import LAYOUTS, Run, by_optimizer, copies_apart, spread
from tests.support.methods import fitting_graph

OF_CHANCE = ("ad_psgd", "a2cid2")
"""Methods whose pairs are of whoever comes first, even if all wait for each other."""
BY_BLOCKS = ("power_gossip", "demo", "qadam")
"""Methods that look at a shard as a whole: at its rows and columns, or at blocks of it."""
EXACT = [name for name in ALGORITHMS if name not in (*OF_CHANCE, *BY_BLOCKS)]
ALL_EQUAL = ("gradient_allreduce", "bytegrad")


@cache
def run_of(layout: str) -> Run:
    return Run.of(LAYOUTS[layout])


def options_of(name: str, replicas: int) -> dict[str, Any]:
    """Options by which a method treats each element by itself, and waits for all it is to get."""
    method = ALGORITHMS[name]
    made: dict[str, Any] = {"algorithm": name}
    if method().communication_interval is not None:
        made["communication_interval"] = 2
    if method.default_compression is not None:
        made["compression"] = "bf16"  # element by element, and without chance
    if name in ("beer", "choco_sgd", "deepsqueeze"):
        made["consensus_step"] = 0.6  # whose default is chosen by the size of a bucket
    how = method.how[0]
    made["force_barrier"] = how.windowed
    if how.value in ("neighbors", "put", "get", "accumulate"):
        made["topology"] = fitting_graph(name, replicas)
    if method.owns_momentum:
        made["make"] = partial(torch.optim.SGD, lr=0.05)
    return made


def agrees(layout: str, name: str) -> dict[str, float]:
    """Train by a method, sharded and whole; the difference, and how far replicas are apart."""
    run = run_of(layout)
    train = partial(by_optimizer, **options_of(name, run.layout.replicas))
    sharded, whole = run.train(train)
    return {
        "difference": run.difference(sharded, whole),
        "copies apart": copies_apart(run, sharded),
        "trained": run.difference(run.sharded(), whole),
        "spread": spread(run, sharded),
    }


CASES = {f"{layout}: {name}": partial(agrees, layout, name) for layout in LAYOUTS for name in EXACT}
FEW = ("adapt_then_combine", "local_sgd", "diloco", "noloco", "gradient_allreduce", "win_put")
FEW += ("adapt_with_combine", "async_model_average", "choco_sgd", "des_loc", "push_sum", "edm")
"""At least one of each phase and round."""
OFTEN = [f"uneven: {name}" for name in FEW]
OFTEN += ["tp: adapt_then_combine", "tp: win_put", "tp: choco_sgd", "even: diloco"]
RARELY = [
    f"{layout}: {name}"
    for layout in ("uneven", "even", "tp")
    for name in EXACT
    if f"{layout}: {name}" not in OFTEN
]
EIGHT = [f"{layout}: {name}" for layout in ("both", "four") for name in EXACT]
