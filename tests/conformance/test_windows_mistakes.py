"""Mistakes with windows: each is an error that says what is wrong, on the ranks concerned."""

from __future__ import annotations

import time
from functools import partial

import networkx as nx
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.windows import windows_of
from tests.support import BEFORE_DEADLINE, LoopbackWorld, on, until
from tests.support.loops import on_each_rank

MANY = ("loopback-4", "mpi-2", "shared_memory-2")


def x():
    return torch.full((5,), float(bf.rank()))


@on(*MANY)
@on_each_rank
def test_a_window_that_is_not_there():
    """Never made, or freed: the error names those that are there."""
    bf.win_create(x(), "there")
    calls = {
        "win_put": lambda: bf.win_put(x(), "nope"),
        "win_accumulate": lambda: bf.win_accumulate(x(), "nope"),
        "win_get": lambda: bf.win_get("nope"),
        "win_update": lambda: bf.win_update("nope"),
        "win_update_then_collect": lambda: bf.win_update_then_collect("nope"),
        "win_read_neighbor": lambda: bf.win_read_neighbor("nope", 0),
        "win_free": lambda: bf.win_free("nope"),
        "get_win_version": lambda: bf.get_win_version("nope"),
        "win_staleness": lambda: bf.win_staleness("nope"),
        "win_associated_p": lambda: bf.win_associated_p("nope"),
        "win_mutex": lambda: bf.win_mutex("nope").__enter__(),
    }
    for verb, call in calls.items():
        with pytest.raises(bf.UnknownNameError) as caught:
            call()
        assert str(caught.value) == (
            f"{verb}: argument name: there is no window 'nope'; there are: 'there'. Call "
            "win_create first, on all ranks"
        )
    bf.win_free("there")
    with pytest.raises(KeyError, match="there are: none"):
        bf.win_put(x(), "there")


@on(*MANY)
@on_each_rank
def test_a_tensor_of_another_shape_or_dtype():
    """Puts that do not fit, and windows of bools or complex numbers, are refused."""
    bf.win_create(x(), "x")
    for wrong in (torch.ones(6), torch.ones(5, 1), torch.ones(5, dtype=torch.float64)):
        for verb in (bf.win_put, bf.win_accumulate):
            with pytest.raises(bf.ArgumentError) as caught:
                verb(wrong, "x")
            assert str(caught.value) == (
                f"{verb.__name__}: argument tensor: window 'x' holds torch.float32 of shape (5,), "
                f"got {wrong.dtype} of shape {tuple(wrong.shape)}"
            )
    with pytest.raises(bf.ArgumentError, match=r"win_put: argument tensor: expected a torch\.Tens"):
        bf.win_put([1.0] * 5, "x")
    with pytest.raises(bf.ArgumentError, match="expected a dense tensor"):
        bf.win_put(torch.ones(5).to_sparse(), "x")
    for dtype in (torch.bool, torch.complex64):
        with pytest.raises(bf.DtypeError, match="win_create: a window holds floats or integers, g"):
            bf.win_create(torch.ones(3, dtype=dtype), "y")
    with pytest.raises(bf.ArgumentError, match="win_create: argument name: expected a string, got"):
        bf.win_create(x(), 3)


@on(*MANY)
@on_each_rank
def test_ranks_that_are_no_neighbors():
    """Of a put, an update, a mutex: the error tells who the neighbours are."""
    n, r = bf.size(), bf.rank()
    bf.set_topology(topology.ring(n, style="right"))
    bf.win_create(x(), "x")
    target, source = (r + 1) % n, (r - 1) % n
    nobody = n + 3
    cases = [
        (
            "win_put: argument dst_weights",
            f"an out-neighbour of this rank in the window; those are [{target}]",
            lambda: bf.win_put(x(), "x", dst_weights=[nobody]),
        ),
        (
            "win_accumulate: argument dst_weights",
            "an out-neighbour",
            lambda: bf.win_accumulate(x(), "x", dst_weights={r: 1.0}),
        ),
        (
            "win_get: argument src_weights",
            f"an in-neighbour of this rank in the window; those are [{source}]",
            lambda: bf.win_get("x", {nobody: 1.0}),
        ),
        (
            "win_update: argument src_weights",
            "an in-neighbour",
            lambda: bf.win_update("x", 0.5, {nobody: 0.5}),
        ),
        (
            "win_read_neighbor: argument rank",
            "an in-neighbour",
            lambda: bf.win_read_neighbor("x", nobody),
        ),
        (
            "win_mutex: argument ranks",
            "an out-neighbour",
            lambda: bf.win_mutex("x", ranks=[nobody]).__enter__(),
        ),
        (
            "win_mutex: argument ranks",
            "an in-neighbour",
            lambda: bf.win_mutex("x", for_self=True, ranks=[nobody]).__enter__(),
        ),
    ]
    for head, tail, call in cases:
        with pytest.raises(bf.ArgumentError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(head + ": rank "), message
        assert f"is not {tail}" in message


@on(*MANY)
@on_each_rank
def test_weights_and_handles_that_cannot_be():
    """Weights incomplete, not finite, or fractional for integers raise ArgumentError."""
    peers, sources = bf.out_neighbor_ranks(), bf.in_neighbor_ranks()
    bf.win_create(x(), "x")
    bf.win_create(torch.ones(3, dtype=torch.int32), "whole")
    one = torch.ones(3, dtype=torch.int32)
    cases = [
        (
            "win_update: arguments self_weight, src_weights: expected neither, or a number "
            "and a mapping {rank: weight}, got 0.5 and None",
            lambda: bf.win_update("x", 0.5),
        ),
        ("got None and {}", lambda: bf.win_update("x", src_weights={})),
        ("got 0.5 and [1]", lambda: bf.win_update("x", 0.5, [1])),
        (
            f"win_put: argument dst_weights[{peers[0]}]: expected a finite number, got nan",
            lambda: bf.win_put(x(), "x", dst_weights={peers[0]: float("nan")}),
        ),
        (
            "win_put: argument self_weight: expected a finite number, got 'a'",
            lambda: bf.win_put(x(), "x", "a"),
        ),
        (
            "win_put: argument dst_weights: expected ranks, or a mapping {rank: weight}, got int",
            lambda: bf.win_put(x(), "x", dst_weights=3),
        ),
        (
            f"win_put: argument dst_weights: expected each rank once, got [{peers[0]}, {peers[0]}]",
            lambda: bf.win_put(x(), "x", dst_weights=[peers[0], peers[0]]),
        ),
        (
            "win_put: 0.5 times a value of torch.int32 is no torch.int32; give whole weights, or "
            "make the window of floats",
            lambda: bf.win_put(one, "whole", dst_weights={peers[0]: 0.5}),
        ),
        ("win_accumulate: 0.5 times a value", lambda: bf.win_accumulate(one, "whole", 0.5)),
        ("win_get: 1.5 times a value", lambda: bf.win_get("whole", {sources[0]: 1.5})),
        ("win_update: ", lambda: bf.win_update("whole")),
        (
            "win_wait: argument handle: expected what a non-blocking window verb gives, got 7",
            lambda: bf.win_wait(7),
        ),
        ("win_poll: argument handle", lambda: bf.win_poll(None)),
        ("win_cancel: argument handle", lambda: bf.win_cancel("x")),
    ]
    for words, call in cases:
        with pytest.raises(bf.ArgumentError) as caught:
            call()
        assert words in str(caught.value)


# ranks that do not make the same window


def make_differently(what):
    r = bf.rank()
    tensor, name, zero_init, associated_p = x(), "x", False, False
    if r == 1:
        tensor = torch.ones(4) if what == "shape" else tensor
        tensor = tensor.double() if what == "dtype" else tensor
        name = "y" if what == "name" else name
        zero_init, associated_p = what == "zero_init", what == "associated_p"
    if what == "topology":
        bf.set_topology(topology.ring(bf.size(), style="right") if r else topology.star(bf.size()))
    bf.win_create(tensor, name, zero_init, associated_p=associated_p)


SAID = {
    "shape": "rank 0 gives shape=(5,), but rank 1 (4,)",
    "dtype": "rank 0 gives dtype='float32', but rank 1 'float64'",
    "name": "rank 0 gives name='x', but rank 1 'y'",
    "zero_init": "rank 0 gives zero_init=False, but rank 1 True",
    "associated_p": "rank 0 gives associated_p=False, but rank 1 True",
    "topology": "set the same topology on all ranks",
}


@on("loopback-4", "mpi-4", "shared_memory-4")
@pytest.mark.parametrize("what", SAID)
def test_ranks_that_make_different_windows_hear_of_it_alike(world, what):
    """All ranks raise one MismatchError that tells which argument or graph differs."""
    outcomes = world.outcomes(make_differently, what)
    messages = {outcome.message for outcome in outcomes}
    assert {outcome.error for outcome in outcomes} == {"MismatchError"}
    assert len(messages) == 1, messages
    assert SAID[what] in messages.pop()


@on(*MANY)
@on_each_rank
def test_a_window_can_be_made_after_a_mistake():
    """Ranks agree about the numbers of their windows still."""
    for number in range(3):
        with pytest.raises(bf.MismatchError):
            bf.win_create(torch.ones(3 + bf.rank()), "x")
        assert bf.get_current_created_window_names() == []
        y = torch.ones(number + 1)
        bf.win_create(y, "x")
        bf.win_put(y + 1, "x")
        bf.barrier()
        for j in bf.in_neighbor_ranks():
            assert (bf.win_read_neighbor("x", j) == 2).all()
        bf.win_free("x")


def free_different_ones():
    bf.win_create(x(), "a")
    bf.win_create(x(), "b")
    with pytest.raises(bf.MismatchError) as caught:
        bf.win_free("a" if bf.rank() == 0 else "b")
    return str(caught.value)


@on("loopback-2", "mpi-2", "shared_memory-2")
def test_ranks_that_free_different_windows(world):
    """win_free of two names raises MismatchError on both ranks, which tells both names."""
    for message in world.run(free_different_ones):
        assert "win_free a" in message
        assert "win_free b" in message


@on("loopback-2")
@on_each_rank
def test_a_schedule_that_does_not_repeat():
    """win_create under a schedule without a period raises ArgumentError."""
    schedule = topology.Schedule(
        "moods", bf.size(), None, topology.one_peer_exponential(bf.size()).look_up
    )
    bf.set_topology(schedule)
    with pytest.raises(
        bf.ArgumentError, match="win_create: moods does not repeat, so that its edg"
    ):
        bf.win_create(x(), "x")


# topologies


@on("loopback-1", *MANY)
@on_each_rank
def test_the_topology_stays_while_there_are_windows():
    """set_topology raises TopologyError for all but the very graph, and names the windows."""
    n = bf.size()
    ring = topology.ring(n)
    bf.set_topology(ring)
    bf.win_create(x(), "b")
    bf.win_create(x(), "a")
    for other in (topology.ring(n), topology.star(n), topology.one_peer_exponential(n), None):
        with pytest.raises(topology.TopologyError) as caught:
            bf.set_topology(other)
        assert str(caught.value) == (
            "set_topology: the windows 'a', 'b' lie along the edges of the topology in use; call "
            "win_free() on all ranks before setting another"
        )
        assert bf.load_topology() is ring
    bf.set_topology(ring)  # the very same
    bf.win_free("a")
    with pytest.raises(topology.TopologyError, match="the windows 'b' lie along"):
        bf.set_topology(topology.star(n))
    bf.win_free("b")
    bf.set_topology(topology.star(n))
    bf.win_create(x(), "a")
    assert sorted(bf.get_win_version("a")) == bf.in_neighbor_ranks()


# what was freed


@on(*MANY)
@on_each_rank
def test_a_handle_of_a_freed_window_does_not_wait():
    """Puts, updates and waits for unfinished puts raise ArgumentError after win_free."""
    bf.win_create(x(), "x")
    window = windows_of(bf.current()).find("test", "x")
    put = bf.win_put_nonblocking(x(), "x")
    bf.win_free("x")
    if put._late_peers():  # it has not arrived
        with pytest.raises(bf.ArgumentError, match="window 'x' was freed by win_free"):
            bf.win_wait(put)
    with pytest.raises(bf.ArgumentError, match="window 'x' was freed by win_free"):
        window.put(x(), 1.0, {}, add=False, with_p=False)
    with pytest.raises(bf.ArgumentError, match="window 'x' was freed by win_free"):
        window.update(1.0, {}, reset=False, clone=False, with_p=False)


@on("mpi-2")
@on_each_rank
def test_a_window_that_a_peer_has_forgotten():
    """A put or get whose target has no such window any more raises PeerError that names it.

    Rank 1 forgets its window alone, which win_free never does; others hear of it.
    """
    bf.win_create(x(), "x")
    bf.barrier()
    if bf.rank() == 1:
        windows_of(bf.current()).drop("x")
    bf.barrier()
    if bf.rank() == 0:
        with pytest.raises(bf.PeerError) as caught:
            bf.win_put(x(), "x", dst_weights=[1])
        assert str(caught.value) == (
            "rank 0: window 'x' was freed by rank 1; call win_free on all ranks"
        )
        with pytest.raises(bf.PeerError, match="was freed by rank 1"):
            bf.win_get("x", [1])
    bf.barrier()


@on("loopback-2", "mpi-2", "shared_memory-2")
@on_each_rank
def test_the_mutex_of_a_peer_that_has_forgotten_the_window():
    """require_mutex=True raises PeerError, and does not wait until the deadline."""
    bf.win_create(x(), "x")
    bf.barrier()
    if bf.rank() == 1:
        windows_of(bf.current()).drop("x")
    bf.barrier()
    if bf.rank() == 0:
        started = time.monotonic()
        with pytest.raises(bf.PeerError, match="window 'x' was freed by rank 1"):
            bf.win_put(x(), "x", dst_weights=[1], require_mutex=True)
        assert time.monotonic() - started < BEFORE_DEADLINE
    bf.barrier()


# outside of a world


def test_before_init():
    """win_create and win_put raise NotInitializedError where init() was not called."""
    with pytest.raises(bf.NotInitializedError, match=r"call asyncddp\.init\(\) first"):
        bf.win_create(torch.ones(2), "x")
    with pytest.raises(bf.NotInitializedError):
        bf.win_put(torch.ones(2), "x")


# the end


def end_with_windows_open():
    """Windows, puts under way and a mutex that nobody gives back."""
    big = torch.ones(1_000_000)
    bf.win_create(big, "big")
    bf.win_create(x(), "small", zero_init=True)
    for _ in range(3):
        bf.win_put_nonblocking(big, "big")
        bf.win_accumulate_nonblocking(x(), "small")
    if bf.rank() == 0 and bf.size() > 1:
        windows_of(bf.current()).find("test", "small").mutex._lock((1, 0))
    bf.barrier()


def test_a_world_ends_with_windows_open(world):
    """Twice: nothing of the first world is in the way of the second."""
    for _ in range(2):
        world.run(end_with_windows_open)


def one_leaves_early():
    """Rank 1 is through; on one machine what it published stays readable, and puts go on."""
    bf.set_topology(topology.ring(bf.size()))
    y = x()
    bf.win_create(y, "x")
    bf.win_put(y, "x")
    bf.barrier()
    for j in bf.in_neighbor_ranks():
        assert (bf.win_read_neighbor("x", j) == j).all()
    bf.barrier()  # nobody puts another value before all have read the first
    if bf.rank() == 1:
        return True
    until(lambda: bf.current().engine.has_exited(1), "the word that rank 1 has left")
    started = time.monotonic()
    far = bf.current().transport.window_group is None
    if not far:
        for _ in range(10):
            assert bf.win_put(y, "x") is True
            bf.win_update("x")
            bf.win_get("x")
    elif 1 in bf.out_neighbor_ranks():
        with pytest.raises(bf.PeerLeftError) as caught:
            bf.win_put(y, "x")
        assert "win_put 'x': rank 1 has left" in str(caught.value)
        with pytest.raises(bf.PeerLeftError, match="win_get 'x': rank 1 has left"):
            bf.win_get("x")
        bf.win_update("x")
    else:  # rank 1 shall be the first that its neighbours miss
        for r in (0, 2):
            until(partial(bf.current().engine.has_exited, r), f"the word that rank {r} has left")
    assert time.monotonic() - started < BEFORE_DEADLINE
    return True


@on("loopback-4", "mpi-2", "mpi-4", "shared_memory-2")
def test_a_rank_that_leaves_does_not_stop_the_others(world):
    """Between machines a put says that its target has left; an update goes on all the same."""
    assert all(world.run(one_leaves_early))


def test_a_graph_with_an_edge_that_only_one_end_knows():
    """Where graphs of two ranks differ in an edge, ``win_create`` raises on all ranks."""

    def crooked():
        graph = nx.DiGraph()
        graph.add_nodes_from(range(3))
        graph.add_edge(0, 1 if bf.rank() == 0 else 2)
        bf.set_topology(graph)
        with pytest.raises(bf.MismatchError) as caught:
            bf.win_create(x(), "x")
        return str(caught.value)

    (message,) = set(LoopbackWorld(3).run(crooked))
    assert message == (
        "win_create: rank 1 does not receive from rank 0, which sends to it; set the same "
        "topology on all ranks"
    )
