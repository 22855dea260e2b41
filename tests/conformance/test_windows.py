"""Windows: what the verbs do to buffers, tensors, versions and p, on every transport.

Expected values follow from the rules of the verbs; between writing and reading stands a barrier.
"""

from __future__ import annotations

import random
import time

import networkx as nx
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import BEFORE_DEADLINE, on
from tests.support.oracle import held

SHAPES = [(), (0,), (2, 0), (1,), (3, 4), (70_001,)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def filled(value, shape=(23,), dtype=torch.float64):
    return torch.full(shape, value, dtype=dtype)


def made(value, name="x", shape=(23,), dtype=torch.float64, zero_init=False, **more):
    """A window over a tensor of one value."""
    x = filled(value, shape, dtype)
    assert bf.win_create(x, name, zero_init, **more) is True
    return x


def assert_is(x, value, tolerance=1e-14):
    torch.testing.assert_close(x, torch.full_like(x, value), rtol=tolerance, atol=tolerance)


def uniform_mean(of):
    """The mean of ``of(j)`` over this rank and its in-neighbours."""
    ranks = [bf.rank(), *bf.in_neighbor_ranks()]
    return sum(of(j) for j in ranks) / len(ranks)


# making and freeing


def create_and_free():
    r = bf.rank()
    assert bf.get_current_created_window_names() == []
    x = made(float(r), "b")
    y = made(float(r), "a", zero_init=True)
    assert bf.get_current_created_window_names() == ["a", "b"]
    assert bf.win_create(y, "a") is False, "there is one of that name"
    assert bf.win_update("b") is x
    assert_is(x, float(r))  # buffers begin as copies of the own tensor
    assert bf.win_free("a") is True
    assert bf.get_current_created_window_names() == ["b"]
    made(1.0, "c")
    assert bf.win_free() is True
    assert bf.win_free() is True, "nothing is left"
    assert bf.get_current_created_window_names() == []


def test_windows_come_and_go_by_name(world):
    """win_create returns False for a name in use; win_free frees one window or all of them."""
    world.run(create_and_free)


def made_anew():
    """Nothing of an earlier window of that name is left, whatever was not read of it."""
    r, n = bf.rank(), bf.size()
    for number in range(6):
        x = made(float(r), shape=(7,) if number % 2 else (70_000,), zero_init=True)
        bf.win_put(filled(99.0, tuple(x.shape)), "x")
        bf.win_accumulate(filled(99.0, tuple(x.shape)), "x")
        bf.win_free("x")
        x = made(float(r), shape=tuple(x.shape), zero_init=True)
        bf.barrier()
        assert set(bf.get_win_version("x").values()) <= {0}
        assert_is(bf.win_update_then_collect("x"), float(r))
        bf.barrier()
        bf.win_put(filled(float(r + n), tuple(x.shape)), "x")
        bf.barrier()
        assert_is(bf.win_update_then_collect("x"), r + sum(j + n for j in bf.in_neighbor_ranks()))
        bf.win_free("x")


def test_a_window_made_anew_begins_anew(world):
    """A new window of a freed name has version 0 and nothing that was put into the old one."""
    world.run(made_anew)


# updates


def update_with_weights():
    r = bf.rank()
    sources = bf.in_neighbor_ranks()
    x = made(float(r), zero_init=True)
    bf.win_put(x, "x")
    bf.barrier()
    weights = {j: 0.1 * (j + 1) for j in sources}
    y = bf.win_update("x", 0.5, weights, clone=True)
    assert_is(y, 0.5 * r + sum(w * j for j, w in weights.items()))
    assert_is(x, float(r))
    some = {j: 2.0 for j in sources[:1]}
    assert bf.win_update("x", -1.0, some) is x
    assert_is(x, -r + sum(2.0 * j for j in some))
    bf.barrier()
    assert_is(bf.win_update("x", 0.25, {}), (-r + sum(2.0 * j for j in some)) / 4)


def test_an_update_with_weights_by_hand(world):
    """Neighbours that are not named count nothing; a clone leaves the own tensor as it is."""
    world.run(update_with_weights)


def update_by_the_topology(family):
    graph = {"star": topology.star, "ring": topology.ring}[family](bf.size())
    bf.set_topology(topology.metropolis_weights(graph) if bf.size() > 1 else graph)
    near = topology.neighbors_of(bf.load_topology(), bf.rank())
    r = float(bf.rank())
    x = made(r)
    x *= 2
    bf.win_update("x")
    assert_is(x, near.self_weight * 2 * r + sum(near.src_weights.values()) * r)
    bf.barrier()
    bf.win_put(filled(r), "x")
    bf.barrier()
    before = x[0].item()
    assert_is(
        bf.win_update("x"),
        near.self_weight * before + sum(w * j for j, w in near.src_weights.items()),
    )


@pytest.mark.parametrize("family", ["star", "ring"])
def test_an_update_takes_the_weights_of_the_topology(world, family):
    """Without weights, win_update mixes with this rank's row of the topology."""
    world.run(update_by_the_topology, family)


def collect_twice():
    r, degree = bf.rank(), len(bf.in_neighbor_ranks())
    x = made(float(r))
    assert_is(bf.win_update_then_collect("x"), r * (degree + 1))
    assert bf.win_update_then_collect("x") is x
    assert_is(x, r * (degree + 1))


def test_what_was_collected_is_gone(world):
    """win_update_then_collect empties the buffers that it adds to the tensor."""
    world.run(collect_twice)


def reset_some():
    r, sources = bf.rank(), bf.in_neighbor_ranks()
    made(float(r))
    bf.win_put(filled(float(r)), "x")
    bf.barrier()
    first = {j: 1.0 for j in sources[:1]}
    y = bf.win_update("x", 0.0, first, reset=True, clone=True)
    assert_is(y, sum(first))
    z = bf.win_update("x", 0.0, {j: 1.0 for j in sources}, clone=True)
    assert_is(z, sum(sources) - sum(first))


def test_a_reset_empties_the_buffers_that_are_named(world):
    """win_update with reset=True empties the buffers that src_weights names, and no others."""
    world.run(reset_some)


# puts


def put_and_update():
    r = bf.rank()
    x = made(float(r))
    assert bf.win_put(x, "x") is True
    bf.barrier()
    bf.win_update("x")
    assert_is(x, uniform_mean(float))
    bf.barrier()
    ramp = torch.arange(23, dtype=torch.float64)
    bf.win_put(ramp + r, "x")  # another tensor than the window's own
    bf.barrier()
    x.copy_(ramp + r)
    torch.testing.assert_close(bf.win_update("x"), ramp + uniform_mean(float))


def test_puts_and_an_update_average_with_the_neighbors(world):
    """win_update after puts of all ranks gives the mean with the in-neighbours."""
    world.run(put_and_update)


def put_to_one():
    """Rank r puts 1.23 x r to r + 1, and nothing to others."""
    n, r = bf.size(), bf.rank()
    bf.set_topology(topology.complete(n))
    x = made(float(r))
    target = (r + 1) % n
    bf.win_put(x, "x", dst_weights={target: 1.23} if n > 1 else {})
    bf.barrier()
    source, degree = (r - 1) % n, n - 1
    expected = (r * degree + 1.23 * source) / n if n > 1 else r
    assert_is(bf.win_update("x"), expected)


def test_a_put_to_one_neighbor_with_a_factor(world):
    """win_put to one target scales what arrives there, and leaves all other buffers as is."""
    world.run(put_to_one)


def scaled_in_place():
    r, targets = bf.rank(), bf.out_neighbor_ranks()
    x = made(float(r + 1), zero_init=True)
    y = filled(float(r + 1))
    bf.win_put(y, "x", self_weight=0.5, dst_weights=targets)
    assert_is(y, (r + 1) / 2)
    assert_is(x, float(r + 1))
    bf.win_accumulate(x, "x", 0.25, {j: 3.0 for j in targets})
    assert_is(x, (r + 1) / 4)
    bf.barrier()
    total = sum(4.0 * (j + 1) for j in bf.in_neighbor_ranks())
    assert_is(bf.win_update_then_collect("x"), (r + 1) / 4 + total)


def test_the_tensor_is_scaled_in_place_after_it_was_sent(world):
    """self_weight scales the tensor that was given, and nothing of what is sent."""
    world.run(scaled_in_place)


def accumulate_onto():
    r, sources = bf.rank(), bf.in_neighbor_ranks()
    x = made(float(r))
    bf.win_accumulate(x, "x")
    bf.barrier()
    assert_is(bf.win_update("x"), r + sum(sources) / (len(sources) + 1))
    bf.barrier()
    bf.win_put(filled(10.0), "x")
    for value in (1.0, 2.0, 3.0):
        bf.win_accumulate(filled(value), "x", dst_weights={j: 0.5 for j in bf.out_neighbor_ranks()})
    bf.barrier()
    ones = {j: 1.0 for j in sources}
    assert_is(bf.win_update("x", 0.0, ones, clone=True), 13.0 * len(sources))
    assert_is(bf.win_update("x", 0.0, ones, reset=True, clone=True), 13.0 * len(sources))
    bf.barrier()
    bf.win_accumulate(filled(4.0), "x")
    bf.barrier()
    assert_is(bf.win_update("x", 0.0, ones, clone=True), 4.0 * len(sources))


def test_accumulating_adds_to_what_lies_there(world):
    """To the first value, to a put, and to nothing once it was collected."""
    world.run(accumulate_onto)


def many_outstanding():
    """Twenty non-blocking puts under one name: the last one counts; and all of twenty sums."""
    r, sources = bf.rank(), bf.in_neighbor_ranks()
    made(float(r), shape=(10_000,), zero_init=True)
    handles = [bf.win_put_nonblocking(filled(float(k), (10_000,)), "x") for k in range(20)]
    for handle in handles:
        assert bf.win_wait(handle) is True
        assert bf.win_poll(handle) is True
    bf.barrier()
    ones = {j: 1.0 for j in sources}
    assert_is(bf.win_update("x", 0.0, ones, clone=True, reset=True), 19.0 * len(sources))
    bf.barrier()
    handles = [bf.win_accumulate_nonblocking(filled(float(k), (10_000,)), "x") for k in range(20)]
    for handle in reversed(handles):
        handle.wait()
    bf.barrier()
    assert_is(bf.win_update("x", 0.0, ones, clone=True), 190.0 * len(sources))


def test_many_puts_of_one_window_may_be_under_way(world):
    """Of many non-blocking puts the last one counts, and of accumulates the sum."""
    world.run(many_outstanding)


def flushed():
    r = bf.rank()
    assert bf.win_flush() is True  # there is none
    made(1.0, zero_init=True)
    made(1.0, "y", zero_init=True)
    for k in range(20):
        bf.win_put_nonblocking(filled(float(r + k)), "x")
        bf.win_accumulate_nonblocking(filled(1.0), "y")
    assert bf.win_flush("x") is True
    assert bf.win_flush() is True
    bf.barrier()
    for j in bf.in_neighbor_ranks():
        assert_is(bf.win_read_neighbor("x", j), j + 19.0)
        assert_is(bf.win_read_neighbor("y", j), 20.0)
    with pytest.raises(bf.UnknownNameError, match="win_flush"):
        bf.win_flush("z")


def test_what_was_flushed_is_seen_after_a_barrier(world):
    """In-neighbours read the last put and all accumulates that came before win_flush."""
    world.run(flushed)


def cancelled():
    made(1.0, zero_init=True)
    handle = bf.win_put_nonblocking(filled(5.0), "x")
    bf.win_cancel(handle)
    assert bf.win_poll(handle) is True
    assert bf.win_wait(handle) is True
    bf.win_flush("x")
    bf.barrier()
    for j in bf.in_neighbor_ranks():
        assert_is(bf.win_read_neighbor("x", j), 5.0)
    got = bf.win_get_nonblocking("x")
    bf.win_cancel(got)
    assert bf.win_wait(got) is True
    bf.barrier()
    bf.win_put(filled(6.0), "x")  # comes after it
    bf.barrier()
    for j in bf.in_neighbor_ranks():
        assert_is(bf.win_read_neighbor("x", j), 6.0)


def test_a_cancelled_handle_is_done_and_what_was_sent_arrives(world):
    """After win_cancel win_poll and win_wait return True, and that put and a later one are read."""
    world.run(cancelled)


# gets


def get_neighbors():
    r, sources = bf.rank(), bf.in_neighbor_ranks()
    x = made(float(r))
    assert bf.win_get("x") is True
    assert_is(bf.win_update("x", clone=True), uniform_mean(float))
    assert_is(x, float(r))
    bf.win_get("x", {j: 1.23 for j in sources})
    bf.barrier()
    half = {j: 0.5 for j in sources}
    assert_is(bf.win_update("x", 0.5, half), 0.5 * r + sum(0.5 * 1.23 * j for j in sources))
    bf.barrier()
    now = x[0].item()
    every = bf.allgather_object(now)
    bf.win_get("x", sources[:1])
    for j in sources:
        assert_is(bf.win_read_neighbor("x", j), every[j] if j in sources[:1] else 1.23 * j)
    bf.barrier()
    bf.win_accumulate(filled(1.0), "x")
    bf.barrier()
    for j in sources:
        assert_is(bf.win_read_neighbor("x", j), (every[j] if j in sources[:1] else 1.23 * j) + 1.0)


def test_gets_read_what_neighbors_hold(world):
    """With factors, of some; and what is accumulated later is added to it."""
    world.run(get_neighbors)


def get_after_puts():
    """Also of a rank that puts its tensor, and scales it; for integers with whole factors."""
    r, sources = bf.rank(), bf.in_neighbor_ranks()
    x = made(0.0)
    y = made(r, "y", dtype=torch.int64)
    x.fill_(2 * r + 2.0)
    bf.win_put(x, "x", self_weight=0.5)
    bf.win_accumulate(y, "y", self_weight=3)
    bf.barrier()
    bf.win_get("y")
    for j in sources:
        assert_is(bf.win_read_neighbor("y", j), 3 * j)
    bf.win_get("x")
    for j in sources:
        assert_is(bf.win_read_neighbor("x", j), j + 1.0)
    bf.barrier()
    bf.win_put(x, "x", self_weight=0.5)
    bf.barrier()
    bf.win_get("x")
    for j in sources:
        assert_is(bf.win_read_neighbor("x", j), (j + 1.0) / 2)
    bf.barrier()
    x.fill_(100.0 + r)
    bf.win_update("x", 1.0, {})
    bf.barrier()
    bf.win_get("x")
    for j in sources:
        assert_is(bf.win_read_neighbor("x", j), 100.0 + j)
    bf.barrier()  # who left earlier could not be read any more


def test_gets_follow_what_a_neighbor_does(world):
    """win_get reads the tensor that the neighbour has last put, scaled or updated."""
    world.run(get_after_puts)


# versions and staleness


def versions():
    sources = bf.in_neighbor_ranks()
    made(1.0)

    def at(count):
        assert bf.get_win_version("x") == dict.fromkeys(sources, count)

    at(0)
    bf.barrier()
    bf.win_put(filled(2.0), "x")
    bf.barrier()
    at(1)
    bf.win_update("x")
    at(0)
    bf.win_get("x")
    at(1)
    bf.win_update("x")
    at(0)
    bf.barrier()
    for _ in range(3):
        bf.win_put(filled(2.0), "x")
    bf.win_accumulate(filled(2.0), "x")
    bf.barrier()
    at(4)
    bf.win_update_then_collect("x")
    at(0)
    bf.win_update("x", 1.0, {})
    at(0)


def test_versions_count_what_was_written_since_the_last_update(world):
    """Puts, accumulates and gets count 1 each; an update sets the count to 0."""
    world.run(versions)


def staleness():
    """Rank 0 puts five times, at first once; others read in between."""
    n, r = bf.size(), bf.rank()
    bf.set_topology(topology.complete(n))
    made(0.0)
    for j, old in bf.win_staleness("x").items():
        assert j != r
        assert (old.version, old.steps, old.lag) == (0, 0, 0)
    bf.barrier()
    if r == 0:
        bf.win_put(filled(1.0), "x")
    bf.barrier()
    bf.win_update("x")
    bf.barrier()
    time.sleep(0.1)
    for _ in range(4 if r == 0 else 0):
        bf.win_put(filled(2.0), "x")
    bf.barrier()
    if r != 0:
        old = bf.win_staleness("x")[0]
        assert (old.version, old.steps, old.lag) == (1, 4, -1)
        assert 0.1 <= old.seconds < BEFORE_DEADLINE
        bf.win_update("x")
        old = bf.win_staleness("x")[0]
        assert (old.version, old.steps, old.lag) == (5, 0, -5)
        assert 0 <= old.seconds < BEFORE_DEADLINE
    bf.barrier()


def test_staleness_is_told_in_versions_steps_and_seconds(world):
    """win_staleness tells the version last taken, and its age in steps and seconds."""
    world.run(staleness)


# the associated p


def one_sender():
    """On a ring, rank 0 accumulates with .5/.5/.5: p = 0.5 there, 1.5 at its neighbours."""
    n, r = bf.size(), bf.rank()
    bf.set_topology(topology.ring(n))
    x = made(1.0, zero_init=True, associated_p=True)
    if r == 0:
        bf.win_accumulate(x, "x", 0.5, {j: 0.5 for j in bf.out_neighbor_ranks()})
    bf.barrier()
    bf.win_update_then_collect("x")
    expected = 0.5 if r == 0 else 1.5 if 0 in bf.in_neighbor_ranks() else 1.0
    assert bf.win_associated_p("x") == expected
    assert_is(x, expected)
    made(1.0, "without p")
    bf.win_put(filled(3.0), "without p", self_weight=0.5)
    bf.barrier()
    bf.win_update("without p")
    assert bf.win_associated_p("without p") == 1.0


def test_p_goes_the_way_of_the_tensor(world):
    """p is scaled, sent and collected as the tensor is; without associated_p it stays 1."""
    world.run(one_sender)


def p_is_x(seed):
    """Random puts, sums, updates and collects with column-stochastic weights, from x = p = 1."""
    drawn = random.Random(1000 * seed + bf.rank())
    x = made(1.0, zero_init=True, associated_p=True)
    targets = bf.out_neighbor_ranks()
    for _ in range(10):
        verb = drawn.choice([bf.win_put, bf.win_accumulate, None])
        if verb is not None:
            shares = [drawn.random() + 0.1 for _ in range(len(targets) + 1)]
            own, *others = (share / sum(shares) for share in shares)
            verb(x, "x", own, dict(zip(targets, others, strict=True)), require_mutex=True)
        elif drawn.random() < 0.5:
            bf.win_update("x", require_mutex=True)
        else:
            bf.win_update_then_collect("x")
        assert abs(bf.win_associated_p("x") - x[0].item()) < 1e-12
        assert (x == x[0]).all()
    bf.barrier()
    bf.win_update_then_collect("x")
    assert abs(bf.win_associated_p("x") - x[0].item()) < 1e-12


def test_p_equals_x_where_both_begin_at_one(world):
    """With column-stochastic weights p and x stay equal, whatever verbs ranks use."""
    for seed in range(3):
        world.run(p_is_x, seed)


def push_sum(steps):
    """On an unbalanced digraph: x / p tends to the true mean, and p sums to n."""
    n, r = bf.size(), bf.rank()
    edges = {(j, (j + 1) % n) for j in range(n)} | {(0, n // 2), (0, n - 1)}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((i, j) for i, j in edges if i != j)
    bf.set_topology(graph)
    x = made(float(r), zero_init=True, associated_p=True)
    targets = bf.out_neighbor_ranks()
    share = 1 / (len(targets) + 1)
    for _ in range(steps):
        bf.win_accumulate(x, "x", share, dict.fromkeys(targets, share), require_mutex=True)
        bf.barrier()
        bf.win_update_then_collect("x")
        bf.barrier()
    p = bf.win_associated_p("x")
    assert abs(sum(bf.allgather_object(p)) - n) < 1e-12
    assert_is(x / p, (n - 1) / 2, 1e-9)


@on("loopback-1", "loopback-4", "mpi-4", "shared_memory-4")
def test_push_sum_gives_the_true_mean_on_an_unbalanced_digraph(world):
    """x / p tends to the mean of all ranks, and p sums to their number."""
    world.run(push_sum, 60)


# forms


def any_dtype(dtypes, shapes):
    sources = bf.in_neighbor_ranks()
    for dtype in dtypes:
        for number, shape in enumerate(shapes):
            x = held(bf.rank(), shape, dtype)
            own = x.clone()
            bf.win_create(x, f"{dtype} {number}", zero_init=True)
            bf.win_put(x, f"{dtype} {number}")
            bf.win_accumulate(x, f"{dtype} {number}", dst_weights=bf.out_neighbor_ranks())
            bf.barrier()
            others = [held(j, shape, dtype) for j in sources]
            got = bf.win_update(f"{dtype} {number}", 1.0, dict.fromkeys(sources, 2.0))
            assert got is x
            if dtype.is_floating_point:
                want = own.double() + sum(4.0 * other.double() for other in others)
                most = 1 + sum(4.0 * other.double().abs() for other in others)
                assert ((x.double() - want).abs() <= 4 * torch.finfo(dtype).eps * most).all()
            else:
                want = own + sum(4 * other for other in others)
                assert torch.equal(x, want)
    bf.win_free()


def test_every_float_dtype_and_shape(world):
    """Puts, accumulates and weighted updates are right within the dtype's rounding."""
    world.run(any_dtype, FLOATS, SHAPES)


def test_every_integer_dtype_with_whole_weights(world):
    """Puts, accumulates and updates with whole weights are exact, and wrap around."""
    world.run(any_dtype, INTEGERS, [(), (0,), (5,)])


def non_contiguous():
    r = float(bf.rank())
    base = torch.zeros(6, 8, dtype=torch.float64)
    x = base.t()[::2]
    x += r
    assert not x.is_contiguous()
    bf.win_create(x, "x")
    bf.win_put(x, "x")
    bf.barrier()
    assert bf.win_update("x") is x
    assert_is(x, uniform_mean(float))
    assert_is(base[:, 1::2], 0.0)
    bf.barrier()
    y = filled(r, (6, 4)).t()
    bf.win_put(y, "x", self_weight=2.0)
    assert_is(y, 2 * r)
    bf.barrier()
    for j in bf.in_neighbor_ranks():
        assert_is(bf.win_read_neighbor("x", j), float(j))


def test_tensors_that_are_not_contiguous(world):
    """Window and put tensors may be strided; memory between their elements is not written."""
    world.run(non_contiguous)


def leaf_parameter():
    r = float(bf.rank())
    x = torch.nn.Parameter(filled(r))
    bf.win_create(x, "x")
    bf.win_put(x, "x", self_weight=1.5)
    bf.barrier()
    assert bf.win_update("x", 0.5, {j: 0.5 for j in bf.in_neighbor_ranks()}) is x
    assert x.is_leaf
    assert x.requires_grad
    assert_is(x.detach(), 0.75 * r + sum(0.5 * j for j in bf.in_neighbor_ranks()))
    x.sum().backward()
    assert_is(x.grad, 1.0)


def test_a_parameter_stays_a_leaf(world):
    """A window's parameter is updated in place, requires gradients, and still gets them."""
    world.run(leaf_parameter)


# graphs that change


def one_peer(rounds):
    """After log2(n) rounds of the one-peer graph all hold the mean, exactly."""
    n, r = bf.size(), bf.rank()
    bf.set_topology(topology.one_peer_exponential(n))
    x = made(float(r))
    for _ in range(rounds):
        bf.win_put(x, "x")
        bf.barrier()
        bf.win_update("x")
        bf.barrier()
    assert_is(x, (n - 1) / 2, 0.0)


def test_a_time_varying_graph_takes_the_neighbors_of_the_round(world):
    """Puts and updates in round k use its edges: log2(n) rounds give the exact mean."""
    world.run(one_peer, {1: 1, 2: 1, 4: 2}[world.size])


def directed():
    """A ring in one direction: nobody reads whom it writes to."""
    n, r = bf.size(), bf.rank()
    bf.set_topology(topology.ring(n, style="right"))
    made(float(r))
    for number in range(3):
        bf.win_put(filled(r + 10.0 * number), "x")
        bf.barrier()
        for j in bf.in_neighbor_ranks():
            assert_is(bf.win_read_neighbor("x", j), j + 10.0 * number)
        bf.barrier()


def test_a_directed_graph(world):
    """On a directed ring a rank reads what its in-neighbour has put, put after put."""
    world.run(directed)
