"""Non-blocking averages of several names at once are sent and averaged together.

That is seen in nothing but the time: each is matched by its own name, whatever else a rank has
begun beside it, gives bit by bit what it gives alone, and fails alone.
"""

from __future__ import annotations

import random
import re
import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.conformance.test_mismatches import BEFORE_DEADLINE, ODD, works_on
from tests.support import DELAY, OF_SEVERAL, FileEvent, deadline_of, on
from tests.support.loops import on_each_rank
from tests.support.oracle import held
from tests.support.pairwise import by_transport

SEVERAL = on(*OF_SEVERAL)
NEAR = on("shared_memory-4")
USES = 4
"""Uses after which a name goes through ring buffers."""
SHAPES = [(), (1,), (7,), (3, 5), (64, 64), (0,), (129,), (150_001,)]
GRAPHS = {
    "one peer": topology.one_peer_exponential,
    "ring": topology.ring,
    "directed ring": lambda n: topology.ring(n, style="right"),
}


def given(k, use, shape=None, dtype=None):
    dtype = dtype or (torch.float32, torch.float64)[k % 2]
    return held(bf.rank(), SHAPES[k % len(SHAPES)] if shape is None else shape, dtype, seed=k + use)


def warm(names, shape=(7,)):
    """Bring names to their ring buffers, on a graph whose rounds are of pairs."""
    bf.set_topology(topology.one_peer_hypercube(bf.size()))
    for use in range(USES + 1):
        for name in names:
            bf.neighbor_allreduce(given(0, use, shape, torch.float32), name=name, round=0)


def calls_to(module, name, call):
    """Run a call, and count how often it calls a function of a module."""
    real, counted = getattr(module, name), []

    def counting(*args, **more):
        counted.append(len(args[0]))
        return real(*args, **more)

    setattr(module, name, counting)
    try:
        call()
    finally:
        setattr(module, name, real)
    return counted


def fused(kind):
    """Fifty calls, waited for when all have begun on all ranks."""
    names = [f"n{k}" for k in range(50)]
    warm(names)
    tensors = [given(0, k, (7,), torch.float32).clone() for k in range(50)]
    options = [{"out": x} if kind == "in place" else {} for x in tensors]

    def average():
        handles = [
            bf.neighbor_allreduce_nonblocking(x, name=name, round=0, **more)
            for x, name, more in zip(tensors, names, options, strict=True)
        ]
        bf.barrier()  # sends what is queued
        for handle in handles:
            handle.wait()

    function = "_foreach_lerp_" if kind == "in place" else "_foreach_lerp"
    return calls_to(torch, function, average)


@NEAR
@pytest.mark.parametrize("kind", ["new", "in place"])
def test_many_small_averages_are_computed_together(world, kind):
    """The first is sent alone; nearly all others are averaged by few operations of torch."""
    for sizes in world.run(fused, kind):
        assert sum(sizes) >= 40
        assert len(sizes) <= 5


def as_alone(graph, seed):
    """Rounds of named averages, each begun and ended by each rank in an order of its own."""
    mine = random.Random(100 * seed + bf.rank())
    bf.set_topology(GRAPHS[graph](bf.size()))
    forms, numbers = ["new", "out", "in place"], list(range(24))
    if bf.rank() == 0:  # two ranks that block in orders of their own may wait for each other
        forms.append("blocking")
    for use in range(USES + 3):
        want = [bf.neighbor_allreduce(given(k, use), name=f"a{k}", round=use) for k in numbers]
        handles = {}
        for k in mine.sample(numbers, len(numbers)):
            x, form = given(k, use).clone(), mine.choice(forms)
            if form == "blocking":
                got = bf.neighbor_allreduce(x, name=f"b{k}", round=use)
                assert torch.equal(got, want[k]), (k, use)
                continue
            out = {"new": None, "out": torch.empty_like(x), "in place": x}[form]
            start = bf.neighbor_allreduce_nonblocking
            handles[k] = x, out, start(x, name=f"b{k}", round=use, out=out)
            if mine.random() < 0.1:
                time.sleep(0.002 * mine.random())
            if mine.random() < 0.1:
                handles[mine.choice(list(handles))][2].poll()
        for k in mine.sample(list(handles), len(handles)):
            _, out, handle = handles[k]
            got = handle.wait()
            assert torch.equal(got, want[k]), (k, use)
            assert out is None or got is out
            assert handle.wait() is got


@by_transport(("loopback-4", "mpi-2", "shared_memory-4"), graph=GRAPHS)
def test_each_gives_what_it_gives_alone(world, graph):
    """Bit by bit, whatever the order of calls and waits on each rank, and where one blocks."""
    world.run(as_alone, graph, 1)


def drained_otherwise():
    """Rank 0 waits after every call, the others when all have begun."""
    names = [f"n{k}" for k in range(12)]
    warm(names)
    for use in range(6):
        handles = []
        for k, name in enumerate(names):
            x = given(0, k + use, (7,), torch.float32)
            handles.append(bf.neighbor_allreduce_nonblocking(x, name=name, round=0))
            if bf.rank() == 0:
                handles[-1].wait()
        peer = topology.neighbors_of(bf.load_topology(), bf.rank(), 0).src_weights
        for k, handle in enumerate(handles):
            own = given(0, k + use, (7,), torch.float32)
            other = held(next(iter(peer)), (7,), torch.float32, seed=k + use)
            torch.testing.assert_close(handle.wait(), torch.lerp(own, other, 0.5), rtol=0, atol=0)
    return [bf.current().engine.round_count("neighbor_allreduce", name) for name in names]


@SEVERAL
def test_ranks_may_end_their_calls_at_other_points(world):
    """What one rank takes together the other may take one by one."""
    for counts in world.run(drained_otherwise):
        assert counts == [USES + 1 + 6] * 12


@SEVERAL
@on_each_rank
def test_a_name_that_is_queued_twice_keeps_its_rounds():
    """Several uses of a name under way at once are those of several rounds.

    Without ``round`` each use of a name is the next round, also while another is queued.
    """
    bf.set_topology(topology.one_peer_exponential(bf.size()))
    names, found = ["x", "y"], []
    for _ in range(2 * USES):
        x = torch.tensor([float(bf.rank())])
        start = bf.neighbor_allreduce_nonblocking
        handles = [start(x, name=name) for _ in range(3) for name in names]
        found += [handle.wait().item() for handle in handles]
    want = []
    for use in range(6 * USES):
        near = topology.neighbors_of(bf.load_topology(), bf.rank(), use)
        total = near.self_weight * bf.rank()
        want += [total + sum(w * r for r, w in near.src_weights.items())] * 2
    assert found == pytest.approx(want)


def sent_by_the_thread(folder):
    """Rank 0 begins its calls and then waits for all others outside of the library."""
    names = [f"n{k}" for k in range(8)]
    warm(names)
    ended = FileEvent(folder / "ended")
    x = given(0, 0, (7,), torch.float32)
    handles = [bf.neighbor_allreduce_nonblocking(x, name=name, round=0) for name in names]
    if bf.rank() == 0:
        ended.wait_for([1])
    else:
        for handle in handles:
            handle.wait()
        ended.of(bf.rank()).set()
    for handle in handles:
        handle.wait()


@SEVERAL
def test_queued_tensors_are_sent_without_the_caller(world, tmp_path):
    """A rank that computes after its calls keeps no neighbour waiting."""
    world.run(sent_by_the_thread, tmp_path)


def other_form(kind):
    """In the midst of the calls, one rank's has another shape or dtype."""
    names = [f"n{k}" for k in range(9)]
    warm(names)
    handles = []
    for k, name in enumerate(names):
        x = torch.full((7,), float(bf.rank()))
        if k == 4 and bf.rank() == ODD:
            x = torch.ones(3, 1) if kind == "shape" else x.double()
        handles.append(bf.neighbor_allreduce_nonblocking(x, name=name, round=0))
    peer = next(iter(topology.neighbors_of(bf.load_topology(), bf.rank(), 0).src_weights))
    message = None
    for k, handle in enumerate(handles):
        if k == 4 and ODD in (bf.rank(), peer):
            started = time.monotonic()
            with pytest.raises(bf.MismatchError) as info:
                handle.wait()
            assert time.monotonic() - started < BEFORE_DEADLINE
            message = str(info.value)
        else:
            assert handle.wait().tolist() == [(bf.rank() + peer) / 2] * 7
    bf.set_topology(topology.complete(bf.size()))
    bf.barrier()
    works_on()
    return message


@SEVERAL
@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_one_of_another_form_fails_alone(world, kind):
    """Both ranks name the call, each other, expected and got; all other calls end well."""
    one, other = (r"\(7,\)", r"\(3, 1\)") if kind == "shape" else ("float32", "float64")
    told = [message for message in world.run(other_form, kind) if message is not None]
    assert len(told) == 2
    for message in told:
        assert "neighbor_allreduce 'n4' (use 5)" in message, message
        assert re.search(f"expected {kind} ({one}, got {other}|{other}, got {one})", message), (
            message
        )
        assert f"rank {ODD}" in message, message


def one_never_comes(folder):
    """Rank 0 leaves out one of the calls of all others."""
    names = [f"n{k}" for k in range(6)]
    warm(names)
    raised = FileEvent(folder / "raised")
    x = torch.full((7,), float(bf.rank()))
    peer = next(iter(topology.neighbors_of(bf.load_topology(), bf.rank(), 0).src_weights))
    message, mine = None, [name for name in names if name != "n3" or bf.rank() > 0]
    with deadline_of(1.0):
        start = bf.neighbor_allreduce_nonblocking
        handles = {name: start(x, name=name, round=0) for name in mine}
        for name, handle in handles.items():
            if name == "n3" and peer == 0:
                started = time.monotonic()
                with pytest.raises(bf.WaitTimeoutError) as info:
                    handle.wait()
                assert 1.0 <= time.monotonic() - started + 0.1 < 1.1 + DELAY
                message = str(info.value)
            else:
                assert handle.wait().tolist() == [(bf.rank() + peer) / 2] * 7
    if peer == 0:
        raised.of(bf.rank()).set()
    if bf.rank() == 0:
        raised.wait_for([peer])
    return message


@NEAR
def test_one_that_never_comes_fails_alone(world, tmp_path):
    """The rank that waits raises by its deadline and says who is missing; other calls end well."""
    told = [message for message in world.run(one_never_comes, tmp_path) if message is not None]
    assert len(told) == 1
    assert "neighbor_allreduce 'n3' (use 5)" in told[0]
    assert "missing: rank 0" in told[0]


@NEAR
@on_each_rank
def test_two_threads_of_each_rank():
    """Calls of one thread beside those of another give each its mean.

    Two threads of each rank, each with calls of its own, all of which are queued together.
    """
    names = {label: [f"{label}{k}" for k in range(10)] for label in "ab"}
    warm([*names["a"], *names["b"]])
    peer = next(iter(topology.neighbors_of(bf.load_topology(), bf.rank(), 0).src_weights))
    problems = []

    def work(label):
        try:
            for use in range(30):
                x = torch.full((7,), float(bf.rank() + use))
                start = bf.neighbor_allreduce_nonblocking
                handles = [start(x, name=name, round=0) for name in names[label]]
                for handle in handles:
                    assert handle.wait().tolist() == [(bf.rank() + peer) / 2 + use] * 7
        except (AssertionError, bf.AsyncDDPError) as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(label,)) for label in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def not_waited_for():
    """Calls whose caller does not wait soon are completed, so that neighbours can go on."""
    names = [f"n{k}" for k in range(6)]
    warm(names)
    x = torch.full((7,), float(bf.rank()))
    handles = [
        bf.neighbor_allreduce_nonblocking(x, name=name, round=0) for _ in range(4) for name in names
    ]
    time.sleep(0.3)
    return [handle.poll() for handle in handles]


@NEAR
def test_calls_end_without_their_caller(world):
    """All of them have ended after a while, though several use each name."""
    for polled in world.run(not_waited_for):
        assert all(polled)


def ordinary_results():
    """One call outside of inference mode, waited for within it together with others."""
    names = [f"n{k}" for k in range(4)]
    warm(names)
    x = torch.ones(7)
    handles = [bf.neighbor_allreduce_nonblocking(x, name=name, round=0) for name in names]
    bf.barrier()
    with torch.inference_mode():
        handles[1].wait()
    handles[2].wait().add_(1.0)
    weight = torch.ones(7, requires_grad=True)
    (handles[3].wait() * weight).sum().backward()
    return weight.grad.tolist()


@NEAR
def test_results_are_ordinary_tensors(world):
    """Those that were averaged on the occasion of a wait in inference mode may be trained with."""
    assert world.run(ordinary_results) == [[1.0] * 7] * world.size
