"""``ops``: what the verbs and a training step cost, from 4 B to 64 MB."""

from __future__ import annotations

import topology
from benchmarks.contract import Table, World
from benchmarks.mixing import mixing_table
from benchmarks.steps import step_table
from benchmarks.sums import allreduce_table

__all__ = ["tables"]

_KB = 1024
_SIZES = tuple(4 * 4**power for power in range(13))  # 4 B … 64 MB
_QUICK = (4, 4 * _KB, 256 * _KB, 4 * _KB * _KB)


def tables(world: World, *, quick: bool) -> list[Table]:
    """The tables of this bench."""
    sizes = _QUICK if quick else _SIZES
    one_peer = topology.one_peer_exponential(world.size)
    exp2 = topology.as_schedule(topology.exponential_two(world.size))
    return [
        mixing_table(world, "one_peer", "neighbor_allreduce, one peer per call", one_peer, sizes),
        mixing_table(world, "exp2", "neighbor_allreduce, exponential-2 graph", exp2, sizes),
        allreduce_table(world, sizes),
        step_table(world, (64,) if quick else (32, 128, 512, 1024)),
    ]
