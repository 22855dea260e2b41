"""BlueFog's hierarchical verbs on two simulated machines of two ranks, as in its own tests."""

from __future__ import annotations

import itertools

import pytest
import torch

import asyncddp.integrations.bluefog as bf
from tests.support import on

worlds = on("loopback-4", "shared_memory-4")

SHAPES = [(23,), (23, 23)]
FLOATS = [torch.float16, torch.float32, torch.float64]


def filled(value, shape=(23,), dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


def assert_is(tensor, value, shape=None):
    tolerance = 1e-3 if tensor.dtype == torch.float16 else 1e-6
    if shape is not None:
        assert tuple(tensor.shape) == shape
    assert (tensor.double() - value).abs().max().item() <= tolerance


def hierarchical():
    bf.init()
    r = bf.rank()
    assert (bf.local_size(), bf.local_rank(), bf.machine_rank()) == (2, r % 2, r // 2)
    assert bf.load_machine_topology() is None
    assert bf.in_neighbor_machine_ranks() == bf.out_neighbor_machine_ranks() == []
    machines = bf.ExponentialTwoGraph(bf.machine_size())
    assert bf.set_machine_topology(machines) is True
    assert bf.load_machine_topology() is machines
    assert bf.is_homogeneous()
    m, length = bf.machine_rank(), bf.local_size()
    for dtype, shape in itertools.product(FLOATS, SHAPES):
        x = filled(r, shape, dtype)
        inside = r - bf.local_rank() + (length - 1) / 2
        assert_is(bf.allreduce(x, is_hierarchical_local=True, name="x"), inside, shape)
        assert_is(bf.allreduce_(x.clone(), True, True), inside, shape)
        x = filled(m, shape, dtype)
        near = bf.in_neighbor_machine_ranks()
        y = bf.hierarchical_neighbor_allreduce(x)
        assert_is(y, (m + sum(near)) / (len(near) + 1), shape)
        y = bf.hierarchical_neighbor_allreduce(
            x, self_weight=0.0, src_machine_weights={1 - m: 1.0}, dst_machine_weights=[1 - m]
        )
        assert_is(y, 1 - m, shape)
        y = bf.hierarchical_neighbor_allreduce(
            x,
            self_weight=0.0,
            src_machine_weights={1 - m: 0.5},
            dst_machine_weights={1 - m: 2.0},
        )
        assert_is(y, 1 - m, shape)


@worlds
def test_hierarchical(world):
    """Two machines of two ranks: the mean inside, weights between."""
    world.run(hierarchical, settings={"ranks_per_machine": 2})


def hierarchical_anchors():
    bf.init()
    m = bf.machine_rank()
    x = filled(float(bf.rank()), dtype=torch.float64)
    bf.set_machine_topology(bf.RingGraph(2))
    assert_is(bf.hierarchical_neighbor_allreduce(x), 1.5)
    move = {"src_machine_weights": {1 - m: 0.75}, "dst_machine_weights": [1 - m]}
    y = bf.hierarchical_neighbor_allreduce(x, self_weight=0.25, **move)
    assert_is(y, 2.0 if m == 0 else 1.0)
    weights = {"src_machine_weights": {1 - m: 0.5}, "dst_machine_weights": {1 - m: 0.5}}
    y = bf.hierarchical_neighbor_allreduce(x, self_weight=0.5, enable_topo_check=True, **weights)
    assert_is(y, 0.5 * (0.5 + 2 * m) + 0.25 * (0.5 + 2 * (1 - m)))
    with pytest.raises(ValueError, match="expected none, the first two, or all three"):
        bf.hierarchical_neighbor_allreduce(x, self_weight=0.5)
    handles = [
        bf.hierarchical_neighbor_allreduce_nonblocking(x + k, name=f"h{k}") for k in range(50)
    ]
    for k, handle in enumerate(handles):
        assert_is(bf.wait(handle), 1.5 + k)


@worlds
def test_hierarchical_weights_and_many_at_once(world):
    """Numbers that BlueFog gives for two machines of two ranks."""
    world.run(hierarchical_anchors, settings={"ranks_per_machine": 2})
