"""Handles of non-blocking verbs: order, reuse of names, waiting, fusion."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.transport import Transport
from tests.support import DELAY, OF_SEVERAL, FileEvent, on, until
from tests.support.loops import on_each_rank
from tests.support.oracle import check, held, mixed
from tests.support.pairwise import by_transport

SEVERAL = on(*OF_SEVERAL)


def expected(of):
    near = topology.neighbors_of(bf.load_topology(), bf.rank())
    return mixed(bf.rank(), near.self_weight, near.src_weights, of)


def any_order(seed, count):
    """Every rank starts named verbs in an order of its own, and waits in another."""
    mine = random.Random(1000 * seed + bf.rank())
    numbers = list(range(count))
    handles = {}
    for k in mine.sample(numbers, count):
        x = held(bf.rank(), (k,), torch.float32, seed=k)
        handles[k] = (x, bf.neighbor_allreduce_nonblocking(x, name=f"layer {k}"))
        if mine.random() < 0.2:
            time.sleep(0.002 * mine.random())
    for k in mine.sample(numbers, count):
        x, handle = handles[k]
        check(handle.wait(), x, expected(lambda r, k=k: held(r, (k,), torch.float32, seed=k)))


@SEVERAL
@pytest.mark.parametrize("seed", range(3))
def test_named_verbs_match_in_whatever_order_ranks_start_and_end_them(world, seed):
    """Calls match by name: each gives the mean of the tensors that were given under it."""
    world.run(any_order, seed, 40)


def mixed_kinds(seed):
    """Neighbour verbs in orders of their own, between collectives in one order for all."""
    mine = random.Random(1000 * seed + bf.rank())
    rank, n = bf.rank(), bf.size()
    handles = []
    for k in range(12):
        x = held(rank, (3,), torch.float32, seed=k)
        mean = expected(lambda r, k=k: held(r, (3,), torch.float32, seed=k))
        gathered = torch.tensor([100 * r + k for r in bf.in_neighbor_ranks()])
        starts = [
            lambda k=k, x=x, mean=mean: (
                bf.neighbor_allreduce_nonblocking(x, name=f"r{k}"),
                lambda got: check(got, x, mean),
            ),
            lambda k=k, gathered=gathered: (
                bf.neighbor_allgather_nonblocking(torch.tensor([100 * rank + k]), name=f"g{k}"),
                lambda got: torch.testing.assert_close(got, gathered),
            ),
        ]
        mine.shuffle(starts)
        handles += [start() for start in starts]
        handle = bf.allreduce_nonblocking(torch.tensor([rank + k]), average=False)
        total = n * (n - 1) // 2 + n * k
        handles.append(
            (handle, lambda got, total=total: torch.testing.assert_close(got.item(), total))
        )
        if k % 3 == 0:
            handle.wait()
    mine.shuffle(handles)
    for handle, holds in handles:
        holds(handle.wait())


@SEVERAL
def test_neighbour_verbs_come_in_any_order_between_collectives(world):
    """Named neighbour verbs may start in any order between collectives in one order."""
    world.run(mixed_kinds, 1)


def overtaken(folder):
    """Rank 0 enters the collective only after all others have ended what they began after it."""
    overtook = FileEvent(folder / "overtook")
    x = torch.tensor([float(bf.rank())])
    if bf.rank() > 0:
        collective = bf.allreduce_nonblocking(x, average=False)
    mean = bf.neighbor_allreduce(x, name="later")
    check(mean, x, expected(lambda r: torch.tensor([float(r)])))
    if bf.rank() > 0:
        assert not collective.poll()
        overtook.of(bf.rank()).set()
    else:
        overtook.wait_for(range(1, bf.size()))
        collective = bf.allreduce_nonblocking(x, average=False)
    return collective.wait().item()


@SEVERAL
def test_neighbour_verbs_overtake_collectives(world, tmp_path):
    """A neighbour verb ends though a collective begun before it waits for a rank."""
    assert world.run(overtaken, tmp_path) == [sum(range(world.size))] * world.size


def same_name_again():
    """A name is reused at once: uses are matched by their number, even while both are under way."""
    x = [torch.full((2,), float(bf.rank() + 100 * k)) for k in range(6)]
    handles = [bf.neighbor_allreduce_nonblocking(tensor, name="same") for tensor in x]
    order = range(6) if bf.rank() % 2 else reversed(range(6))
    for k in order:
        check(
            handles[k].wait(), x[k], expected(lambda r, k=k: torch.full((2,), float(r + 100 * k)))
        )
    for k in range(200):  # beyond the distance after which senders wait for their receivers
        bf.neighbor_allreduce(torch.tensor([float(k)]), name="same")


@SEVERAL
def test_a_name_may_be_used_again_and_twice_at_once(world):
    """Uses of one name match by number, whatever the order in which they are waited for."""
    world.run(same_name_again)


@on_each_rank
def test_names_of_the_user_s_choice():
    """Names may be empty, long or like those of the library, which they never match.

    Names of the user's choice never meet those that the library gives.
    """
    x = torch.tensor([float(bf.rank())])
    names = ["collective", "<collective>/x", "neighbor_allreduce", "", "a/b", "ä", "a" * 1000]
    handles = [bf.neighbor_allreduce_nonblocking(x, name=name) for name in names]
    total = bf.allreduce(x, average=False, name="collective")
    gathered = bf.allgather(x, name="collective")
    assert total.item() == gathered.sum().item() == sum(range(bf.size()))
    for handle in handles:
        check(handle.wait(), x, expected(lambda r: torch.tensor([float(r)])))


def waits(folder):
    given_up = FileEvent(folder / "given up")
    late = bf.rank() == 0
    if late:
        given_up.wait()
        assert bf.barrier_nonblocking(name="late").wait() is None
        return None
    handle = bf.barrier_nonblocking(name="late")
    shown = repr(handle)
    assert not handle.poll()
    started = time.monotonic()
    with pytest.raises(bf.WaitTimeoutError) as caught:
        handle.wait(timeout=0.1)
    assert 0.1 <= time.monotonic() - started < 0.1 + DELAY
    with pytest.raises(bf.WaitTimeoutError):
        handle.wait(timeout=0)
    given_up.set()
    assert handle.wait() is None
    assert handle.wait() is None
    assert handle.result is None
    assert handle.poll()
    return str(caught.value), shown, repr(handle)


@on("loopback-2", "mpi-2")
def test_wait_with_a_timeout_gives_up_and_the_verb_goes_on(world, tmp_path):
    """wait(timeout) raises and names the missing rank; a later wait() ends well."""
    told, before, after = world.run(waits, tmp_path)[1]
    called = "barrier 'late' (collective, number 0)"
    assert told == f"rank 1: {called} was not done in 0.1 s; missing: rank 0"
    assert before == f"<Handle {called} under way>"
    assert after == f"<Handle {called} done>"


def a_failed_handle():
    """Waiting twice for a verb that failed raises the same error twice."""
    handle = bf.neighbor_allreduce_nonblocking(torch.ones(bf.rank() + 1), name="x")
    told = []
    for _ in range(2):
        with pytest.raises(bf.MismatchError) as caught:
            handle.wait()
        told.append(str(caught.value))
    assert handle.poll()
    return told[0] == told[1]


@on("loopback-2", "mpi-2")
def test_a_failed_verb_stays_failed(world):
    """After a verb has failed, wait() raises its error each time, and poll() returns True."""
    assert world.run(a_failed_handle) == [True, True]


def progresses_alone():
    """Verbs go on while the caller computes and never asks."""
    handle = bf.neighbor_allreduce_nonblocking(torch.full((100_000,), float(bf.rank())))
    until(lambda: handle._work.finished, "what should move without the caller")
    return handle.poll()


def test_a_verb_goes_on_while_the_caller_computes(world):
    """A non-blocking verb ends without any further call of the library by this thread."""
    assert all(world.run(progresses_alone))


class _Counted:
    """Counts what a transport posts."""

    def __init__(self, transport: Transport) -> None:
        self.posts = 0
        self._post = transport.post
        transport.post = self.post  # type: ignore[method-assign]

    def post(self, peer, message):
        self.posts += 1
        self._post(peer, message)


def fused(count, weights):
    """Fifty small verbs in flight, started while peers are still away."""
    bf.set_topology(topology.ring(bf.size()))
    peers = bf.in_neighbor_ranks()
    arguments = {
        "static": {},
        "weighted": {"self_weight": 0.5, "src_weights": dict.fromkeys(peers, 0.5)},
        "dynamic": {
            "self_weight": 0.5,
            "src_weights": dict.fromkeys(peers, 0.5),
            "dst_weights": peers,
        },
        "scaled": {
            "self_weight": 0.5,
            "src_weights": dict.fromkeys(peers, 0.5),
            "dst_weights": dict.fromkeys(peers, 2.0),
        },
    }[weights]
    bf.neighbor_allreduce(torch.ones(7), **arguments)  # confirms the form
    bf.barrier()
    counted = _Counted(bf.current().transport)
    tensors = [held(bf.rank(), (7,), torch.float32, seed=k) for k in range(count)]
    handles = [bf.neighbor_allreduce_nonblocking(x, **arguments) for x in tensors]
    results = [handle.wait() for handle in handles]
    for k, got in enumerate(results):

        def of(rank, k=k):
            return held(rank, (7,), torch.float32, seed=k)

        near = dict.fromkeys(peers, 1.0 if weights == "scaled" else 0.5)
        want = expected(of) if weights == "static" else mixed(bf.rank(), 0.5, near, of)
        check(got, tensors[k], want)
    return counted.posts / len(peers)


@by_transport(OF_SEVERAL, weights=["static", "weighted", "dynamic", "scaled"])
def test_many_small_verbs_travel_in_few_messages(world, weights):
    """Fifty verbs to the same peers are far fewer than fifty messages to each."""
    for posts in world.run(fused, 50, weights):
        assert posts <= 20


@SEVERAL
def test_two_verbs_at_once_give_each_its_mean(world):
    """Two non-blocking calls that start together to the same peers each give their mean."""
    world.run(fused, 2, "static")


def from_threads():
    """Four threads of one rank, each with names of its own, beside the main thread's verbs."""
    errors = []

    def work(label):
        try:
            for k in range(25):
                x = torch.full((3,), float(bf.rank() + k))
                got = bf.neighbor_allreduce(x, name=f"{label}.{k}")
                check(got, x, expected(lambda r, k=k: torch.full((3,), float(r + k))))
        except (AssertionError, bf.AsyncDDPError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(label,)) for label in "abcd"]
    for thread in threads:
        thread.start()
    work("main")
    for thread in threads:
        thread.join()
    return [str(error) for error in errors]


@on("mpi-2")
def test_threads_of_one_rank_may_all_call_verbs(world):
    """Five threads of a rank may call verbs at the same time under names of their own."""
    assert world.run(from_threads) == [[]] * world.size
