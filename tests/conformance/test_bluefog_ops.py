"""BlueFog's two-sided verbs on four ranks, by the rules of BlueFog's own tests.

A tensor of rank r is filled with r unless something else is said; shapes are those over there.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

import asyncddp.integrations.bluefog as bf
from tests.support import on

worlds = on("loopback-4", "shared_memory-4")

SHAPES = [(23,), (23, 23), (23, 23, 23)]
FLOATS = [torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]
SMALL = [torch.uint8, torch.int8, torch.int16]
SIZES = [17, 32, 81, 12]


def filled(value, shape=(23,), dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


def assert_is(tensor, value, shape=None):
    tolerance = 1e-3 if tensor.dtype == torch.float16 else 1e-5
    if shape is not None:
        assert tuple(tensor.shape) == shape
    assert (tensor.double() - value).abs().max().item() <= tolerance


# collectives


def broadcasts():
    bf.init()
    r, n = bf.rank(), bf.size()
    for dtype, shape in itertools.product([*SMALL, *INTEGERS, *FLOATS], SHAPES[:2]):
        for root in range(n):
            x = filled(r, shape, dtype)
            y = bf.broadcast(x, root, name=f"b{root}")
            assert y.dtype == dtype
            assert_is(y, root, shape)
            assert_is(x, r)
            assert bf.broadcast_(x, root_rank=root) is x
            assert_is(x, root, shape)
    x = filled(r)
    handle = bf.broadcast_nonblocking_(x, 1)
    assert bf.wait(handle) is x
    assert_is(x, 1)


@worlds
def test_broadcast_from_every_root(world):
    """All eight dtypes, copied and in place."""
    world.run(broadcasts)


def allreduces():
    bf.init()
    r, n = bf.rank(), bf.size()
    for dtype, shape in itertools.product(FLOATS, SHAPES):
        x = filled(r, shape, dtype)
        assert_is(bf.allreduce(x, average=True, name="x"), (n - 1) / 2, shape)
        assert_is(x, r)
        assert bf.allreduce_(x) is x
        assert_is(x, (n - 1) / 2)
    for dtype in [*FLOATS, *INTEGERS]:
        assert_is(bf.allreduce(filled(r, dtype=dtype), average=False), n * (n - 1) / 2)
    assert_is(bf.allreduce(torch.tensor(float(r))), (n - 1) / 2, ())
    with pytest.raises(AssertionError, match=r"average: expected False for torch\.int64"):
        bf.allreduce(filled(r, dtype=torch.int64))


@worlds
def test_allreduce_averages_and_sums(world):
    """The average of integers is refused with an ``AssertionError``."""
    world.run(allreduces)


def several_at_once():
    bf.init()
    r, n = bf.rank(), bf.size()
    handles = [bf.allreduce_nonblocking(filled(r + k), name=f"a{k}") for k in range(2)]
    for k, handle in enumerate(handles):
        assert_is(bf.synchronize(handle), (n - 1) / 2 + k)
    tensors = [filled(r + k) for k in range(2)]
    handles = [bf.allreduce_nonblocking_(x) for x in tensors]
    assert [bf.wait(handle) is x for handle, x in zip(handles, tensors, strict=True)] == [True] * 2
    assert_is(tensors[1], (n - 1) / 2 + 1)


@worlds
def test_several_allreduces_at_once(world):
    """In whatever order they are waited for."""
    world.run(several_at_once)


def allgathers():
    bf.init()
    r, n = bf.rank(), bf.size()
    for dtype, shape in itertools.product([*SMALL, *INTEGERS, *FLOATS], SHAPES[:2]):
        y = bf.allgather(filled(r, shape, dtype))
        assert tuple(y.shape) == (shape[0] * n, *shape[1:])
        for rank, part in enumerate(y.split(shape[0])):
            assert_is(part, rank)
    y = bf.synchronize(bf.allgather_nonblocking(filled(r, (SIZES[r], 7)), name="g"))
    for rank, part in enumerate(y.split(SIZES)):
        assert_is(part, rank, (SIZES[rank], 7))
    assert bf.allgather(torch.empty(0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="at least 1 dimension"):
        bf.allgather(torch.tensor(1.0))


@worlds
def test_allgather_in_the_order_of_the_ranks(world):
    """Also where ranks have first dimensions of their own."""
    world.run(allgathers)


# averages among neighbours


def who_sends_to_whom_does_not_fit():
    bf.init()
    r, n = bf.rank(), bf.size()
    x = filled(r)
    with pytest.raises(ValueError, match="expected"):
        bf.neighbor_allreduce(
            x,
            self_weight=0.5,
            src_weights={(r - 1) % n: 0.5},
            dst_weights={(r + 2) % n: 1.0},
            enable_topo_check=True,
        )
    assert_is(bf.neighbor_allreduce(x), (r + (r - 1) % n + (r - 2) % n) / 3)


@worlds
def test_neighbours_that_do_not_fit_raise_on_all_ranks(world):
    """A ``ValueError`` as in BlueFog; the ranks go on afterwards."""
    world.run(who_sends_to_whom_does_not_fit)


def static_averages():
    r, n = bf.rank(), bf.size()
    graphs = [bf.ExponentialTwoGraph(n), bf.MeshGrid2DGraph(n)]
    graphs += [bf.RingGraph(n, style) for style in (0, 1, 2)]
    graphs += [bf.StarGraph(n, center) for center in range(n)]
    for graph in graphs:
        assert bf.set_topology(graph)
        near = [j for j in graph.predecessors(r) if j != r]
        for dtype in FLOATS:
            expected = (r + sum(near)) / (len(near) + 1)
            assert_is(bf.neighbor_allreduce(filled(r, dtype=dtype), name="x"), expected)
    bf.set_topology(bf.RingGraph(n, 1))
    assert bf.in_neighbor_ranks() == [(r + 1) % n]
    bf.set_topology(bf.RingGraph(n, 2))
    assert bf.in_neighbor_ranks() == [(r - 1) % n]
    bf.set_topology(bf.StarGraph(n), is_weighted=True)
    expected = (n - 1) / 2 if r == 0 else r * (1 - 1 / n)
    assert_is(bf.neighbor_allreduce(filled(r, dtype=torch.float64)), expected)


@worlds
def test_static_averages(world):
    """Uniform on every graph, weighted on a star where that is asked for."""
    world.run(static_averages)


def dynamic_averages():
    bf.init()
    r, n = bf.rank(), bf.size()
    near, after = bf.in_neighbor_ranks(), bf.out_neighbor_ranks()
    own = 1 / (len(near) + 1)
    y = bf.neighbor_allreduce(
        filled(r), self_weight=own, src_weights=dict.fromkeys(near, own), dst_weights=after
    )
    assert_is(y, (r + sum(near)) / (len(near) + 1))
    y = bf.neighbor_allreduce(
        filled(r),
        self_weight=0.5,
        src_weights=dict.fromkeys(near, 1.0),
        dst_weights=dict.fromkeys(after, 0.5),
    )
    assert_is(y, (r + sum(near)) / 2)
    generator = bf.GetDynamicOnePeerSendRecvRanks(bf.ExponentialTwoGraph(n), r)
    x = filled(r, dtype=torch.float64)
    for _ in range(2):
        send, receive = next(generator)
        weights = dict.fromkeys(receive, 0.5)
        x = bf.neighbor_allreduce(x, self_weight=0.5, src_weights=weights, dst_weights=send)
    assert_is(x, (n - 1) / 2)


@worlds
def test_dynamic_averages(world):
    """Receiver and sender may weight; one peer at a time gives the mean after log2(n) turns."""
    world.run(dynamic_averages)


def wrong_arguments():
    bf.init()
    r, n = bf.rank(), bf.size()
    x = filled(r)
    for options, message in (
        ({"self_weight": 0.5}, "expected none, the first two, or all three"),
        ({"dst_weights": [(r + 1) % n]}, "expected none, the first two, or all three"),
        (
            {"self_weight": 1.0, "src_weights": {}, "dst_weights": [(r + 1) % n] * 2},
            "each rank once",
        ),
        ({"self_weight": 1.0, "src_weights": {r: 1.0}}, "other than"),
    ):
        with pytest.raises(ValueError, match=message):
            bf.neighbor_allreduce(x, **options)
    with pytest.raises(TypeError, match="'neighbor_weights'; it is called src_weights now"):
        bf.neighbor_allreduce(x, self_weight=1.0, neighbor_weights={})
    with pytest.raises(TypeError, match="'send_neighbors'; it is called dst_weights now"):
        bf.neighbor_allreduce_nonblocking(x, send_neighbors=[])
    with pytest.raises(ValueError, match="expected both or neither"):
        bf.neighbor_allgather(x, src_ranks=[0])
    with pytest.raises(ValueError, match="int64"):
        bf.neighbor_allreduce(filled(r, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype"):
        bf.neighbor_allreduce(torch.zeros(3, dtype=torch.float8_e4m3fn))
    with pytest.raises(RuntimeError, match="no machine topology is set"):
        bf.hierarchical_neighbor_allreduce(x)
    assert_is(bf.allreduce(x), (n - 1) / 2)


@on("loopback-4")
def test_arguments_that_cannot_be(world):
    """Refused before anything is sent, so that the ranks go on."""
    world.run(wrong_arguments)


def gathers():
    bf.init()
    r, n = bf.rank(), bf.size()
    for dtype in [*SMALL, *INTEGERS, *FLOATS]:
        near = bf.in_neighbor_ranks()
        y = bf.neighbor_allgather(filled(r, (5, 3), dtype))
        assert [part[0, 0].item() for part in y.split(5)] == near
    y = bf.neighbor_allgather(filled(r, (SIZES[r], 2)))
    assert [int(part[0, 0]) for part in y.split([SIZES[j] for j in near])] == near
    others = [j for j in range(n) if j != r]
    shuffled = random.Random(7 + r).sample(others, len(others))
    y = bf.neighbor_allgather(
        filled(r, (SIZES[r],)), src_ranks=np.array(shuffled), dst_ranks=others
    )
    parts = y.split([SIZES[j] for j in shuffled])
    assert [int(part[0]) for part in parts] == shuffled
    handle = bf.neighbor_allgather_nonblocking(filled(r, (4,)), name="g")
    assert bf.wait(handle).shape == (4 * len(near),)


@worlds
def test_neighbor_allgather(world):
    """Ascending on the graph, in the order of ``src_ranks`` where that is given."""
    world.run(gathers)


def gossip():
    bf.init()
    r = bf.rank()
    partner = r ^ 1
    assert_is(bf.pair_gossip(filled(r), partner), (r + partner) / 2)
    y = bf.pair_gossip(filled(r), target_rank=partner, self_weight=0.25, pair_weight=0.75)
    assert_is(y, 0.25 * r + 0.75 * partner)
    assert_is(bf.wait(bf.pair_gossip_nonblocking(filled(r), partner)), (r + partner) / 2)
    with pytest.raises(ValueError, match="expected both or neither"):
        bf.pair_gossip(filled(r), partner, self_weight=0.5)


@worlds
def test_pair_gossip(world):
    """Whether negotiation is "skipped" or not."""
    world.run(gossip)


# handles and names


def handles_and_names():
    bf.init()
    r = bf.rank()
    handle = bf.neighbor_allreduce_nonblocking(filled(r), name="x")
    gathered = bf.neighbor_allgather_nonblocking(filled(r), name="x")
    assert type(handle) is int
    assert gathered == handle + 1
    bf.wait(gathered)
    while not bf.poll(handle):
        pass
    bf.synchronize(handle)
    for call in (bf.poll, bf.synchronize, bf.wait):
        with pytest.raises(ValueError, match=f"nobody has waited for yet, got {handle}"):
            call(handle)
    with pytest.raises(ValueError, match="nobody has waited for yet, got 1000"):
        bf.wait(1000)
    x = filled(r).requires_grad_()
    assert not bf.neighbor_allreduce(x, name="x").requires_grad
    assert not bf.allreduce(x).requires_grad
    for shape in ((0,), (2, 0)):
        assert bf.neighbor_allreduce(torch.empty(shape)).shape == shape
        assert bf.allreduce(torch.empty(shape)).shape == shape


@worlds
def test_handles_and_names(world):
    """Numbers that are gone after waiting; one name for verbs of two kinds; nothing of autograd."""
    world.run(handles_and_names)


def roots_differ():
    bf.init()
    bf.broadcast(filled(bf.rank()), root_rank=bf.rank() % 2)


@on("loopback-4")
def test_roots_that_differ_raise(world):
    """Where BlueFog gives wrong data, and hangs."""
    outcomes = world.outcomes(roots_differ)
    assert all(outcome.error == "MismatchValueError" for outcome in outcomes)


def alone():
    bf.init()
    x = filled(3.0)
    for call in (
        bf.allreduce,
        bf.allgather,
        bf.neighbor_allreduce,
        lambda t: bf.broadcast(t, 0),
    ):
        y = call(x)
        assert_is(y, 3.0, (23,))
        assert y.data_ptr() != x.data_ptr()
    assert bf.neighbor_allgather(x).shape == (0,)
    assert bf.win_create(x, "x")
    assert bf.win_put(x, "x")
    assert bf.win_update("x") is x


@on("loopback-1")
def test_one_rank_alone(world):
    """Everything works, and gives what was put in, never as the same memory."""
    world.run(alone)
