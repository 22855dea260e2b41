"""What holds of windows of tensors on a GPU: the conformance cases, races, and hidden waits."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import asyncddp as bf
from asyncddp import topology
from tests.conformance.test_windows import FLOATS, INTEGERS, SHAPES
from tests.gpu.conformance import Case
from tests.support.oracle import held

__all__ = ["CASES", "each_verb_once", "races", "trains"]

METHODS = {
    "win_put": bf.DistributedWinPutOptimizer,
    "pull_get": bf.DistributedPullGetOptimizer,
    "push_sum": bf.DistributedPushSumOptimizer,
}
_NAMES = (
    *("create_and_free", "made_anew", "update_with_weights", "collect_twice", "reset_some"),
    *("put_and_update", "put_to_one", "scaled_in_place", "accumulate_onto", "many_outstanding"),
    *("flushed", "cancelled", "get_neighbors", "get_after_puts", "versions", "staleness"),
    *("one_sender", "non_contiguous", "leaf_parameter", "directed"),
)
CASES = [
    *(Case("windows", name) for name in _NAMES),
    Case("windows", "any_dtype", (FLOATS, SHAPES)),
    Case("windows", "any_dtype", (INTEGERS, SHAPES)),
    *(Case("windows", "p_is_x", (seed,)) for seed in range(2)),
    Case("windows", "push_sum", (40,), ranks=(4,)),
    Case("windows", "one_peer", (1,), ranks=(2,)),
]
"""What is run through memory that neighbours see and by messages."""


def races(place, steps, side):
    """Slow work before a put makes what is put, and slow work after an update uses the mix.

    What was put is overwritten at once, as is what the update has replaced.
    """
    bf.set_topology(topology.ring(bf.size()))
    sources = bf.in_neighbor_ranks()
    with place.there(), place.side() if side else nullcontext():
        x = torch.zeros(100_000)
        bf.win_create(x, "races", zero_init=True)
        for step in range(steps):
            values = held(bf.rank(), (100_000,), torch.float32, step).cpu()
            late = torch.full((100_000,), float("nan"))
            place.late(late, values)
            handle = bf.win_put_nonblocking(late, "races")
            late.fill_(float("nan"))
            del late
            spoilt = torch.full((100_000,), float("nan"))
            handle.wait()
            bf.barrier()
            place.late(x, values)
            got = bf.win_update("races", 0.5, {j: 0.5 / len(sources) for j in sources}, clone=True)
            twice = got + got
            got.fill_(float("nan"))
            place.busy()
            others = [held(j, (100_000,), torch.float32, step).cpu() for j in sources]
            expected = values + sum(others) / len(others)
            torch.testing.assert_close(twice.cpu(), expected, msg=f"step {step}")
            del spoilt
            bf.barrier()


def each_verb_once(place, watch):
    """Each verb of windows inside ``watch(name)``; rank 0 alone watches.

    ``win_put`` and ``win_accumulate`` are there twice: what they wait for is asked, not waited for.
    """
    bf.set_topology(topology.ring(bf.size()))
    with place.there():
        x, other = torch.ones(50_000), torch.ones(50_000)
        bf.win_create(x, "once")
        verbs = {
            "win_put": lambda: bf.win_put(x, "once", 0.5),
            "win_put_nonblocking": lambda: bf.win_put_nonblocking(other, "once"),
            "win_accumulate": lambda: bf.win_accumulate(other, "once"),
            "win_get": lambda: bf.win_get("once"),
            "win_update": lambda: bf.win_update("once"),
            "win_update clone": lambda: bf.win_update("once", clone=True),
            "win_update_then_collect": lambda: bf.win_update_then_collect("once"),
            "win_read_neighbor": lambda: bf.win_read_neighbor("once", bf.in_neighbor_ranks()[0]),
            "win_flush": lambda: bf.win_flush("once"),
        }
        for name, verb in verbs.items():
            bf.barrier()
            with watch(name) if bf.rank() == 0 else nullcontext():
                verb()
            bf.barrier()


def trains(place, method, steps):
    """Weights on the device and on the host after some steps in which ranks meet."""
    found = []
    for there in (True, False):
        with place.there() if there else nullcontext():
            torch.manual_seed(bf.rank())
            model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)).double()
            weights = [held(0, tuple(w.shape), w.dtype, 7) for w in model.parameters()]
            for weight, value in zip(model.parameters(), weights, strict=True):
                weight.data.copy_(value)
            inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            optimizer = METHODS[method](inner, model=model, window_prefix=f"{method} {there}")
            optimizer.force_barrier = True
            for step in range(steps):
                data = held(bf.rank(), (8, 6), torch.float64, step)
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
            vector = torch.cat([w.detach().reshape(-1) for w in model.parameters()])
            found.append(vector.cpu())
            bf.barrier()
    return found
