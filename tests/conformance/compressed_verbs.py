"""Verbs that take ``compression=``, for the tests of what they have in common."""

from __future__ import annotations

import torch

import asyncddp as bf
from asyncddp import topology

BY_TWO = {"ranks_per_machine": 2}


def neighbours(x, **options):
    return bf.neighbor_allreduce(x, **options)


def machines(x, **options):
    return bf.hierarchical_neighbor_allreduce(x, **options)


def gossip(x, **options):
    return bf.pair_gossip(x, bf.rank() ^ 1, **options)


VERBS = {
    "neighbor_allreduce": neighbours,
    "hierarchical_neighbor_allreduce": machines,
    "pair_gossip": gossip,
    "allreduce": bf.allreduce,
    "local_allreduce": bf.local_allreduce,
    "hierarchical_allreduce": bf.hierarchical_allreduce,
}


def graphs():
    bf.set_topology(topology.ring(bf.size()))
    bf.set_machine_topology(topology.ring(bf.machine_size()))


def held(rank, shape=(9,), dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)
