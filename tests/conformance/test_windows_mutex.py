"""The mutex of a window: who excludes whom, for how long, and what becomes of those who wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.windows import windows_of
from tests.support import FileEvent, deadline_of, on, until
from tests.support.loops import on_each_rank

FOUR = ("loopback-4", "mpi-4", "shared_memory-4")
TWO = ("loopback-2", "mpi-2", "shared_memory-2")


def make(name="x"):
    bf.set_topology(topology.complete(bf.size()))
    bf.win_create(torch.full((3,), float(bf.rank())), name)


def hold_all(folder):
    make()
    given_back = FileEvent(folder / "given back")
    bf.barrier()
    if bf.rank() == 0:
        with bf.win_mutex("x", for_self=True):
            bf.barrier()
            time.sleep(0.5)  # for those who would not wait
            given_back.set()
    else:
        bf.barrier()
        with bf.win_mutex("x", ranks=[0]):
            assert given_back.is_set()
    bf.barrier()


@on(*FOUR)
def test_a_rank_that_holds_its_own_keeps_all_writers_out(world, tmp_path):
    """For as long as it holds it."""
    world.run(hold_all, tmp_path)


def hold_one(folder):
    make()
    given_back, through = FileEvent(folder / "given back"), FileEvent(folder / "through")
    bf.barrier()
    if bf.rank() == 0:
        with bf.win_mutex("x", for_self=True, ranks=[1]):
            bf.barrier()
            through.wait_for(range(2, bf.size()))
            time.sleep(0.3)  # for rank 1, were it not to wait
            given_back.set()
    else:
        bf.barrier()
        bf.win_put(torch.ones(3), "x", dst_weights=[0], require_mutex=True)
        assert bf.rank() != 1 or given_back.is_set()
        through.of(bf.rank()).set()
    bf.barrier()


@on(*FOUR)
def test_a_slot_keeps_one_writer_out(world, tmp_path):
    """Others do not wait for it."""
    world.run(hold_one, tmp_path)


def pairs(seconds):
    """Writers put equal values to two windows; rank 0 never sees two that differ."""
    make("a")
    bf.win_create(torch.zeros(3), "b")
    bf.win_put(torch.zeros(3), "a")
    bf.win_put(torch.zeros(3), "b")
    bf.barrier()
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        count += 1
        if bf.rank() == 0:
            with bf.win_mutex("a", for_self=True):
                for j in bf.in_neighbor_ranks():
                    one = bf.win_read_neighbor("a", j, require_mutex=False)
                    time.sleep(0)
                    assert torch.equal(one, bf.win_read_neighbor("b", j, require_mutex=False))
        else:
            with bf.win_mutex("a", ranks=[0]):
                bf.win_put(torch.full((3,), float(count)), "a", dst_weights=[0])
                time.sleep(0)
                bf.win_put(torch.full((3,), float(count)), "b", dst_weights=[0])
    bf.barrier()
    return count


@on(*FOUR)
def test_what_is_written_under_the_mutex_is_read_together(world):
    """Everybody comes to it again and again."""
    assert min(world.run(pairs, 1.0)) > 0


def updates_wait(folder):
    """``require_mutex`` of an update waits for the writer that holds this rank's slot."""
    make()
    read = FileEvent(folder / "read")
    bf.barrier()
    if bf.rank() == 1:
        with bf.win_mutex("x", ranks=[0]):
            bf.barrier()
            bf.win_put(torch.full((3,), 7.0), "x", dst_weights=[0])
            read.wait()
            time.sleep(0.3)  # for an update that would not wait
            bf.win_put(torch.full((3,), 8.0), "x", dst_weights=[0])
        return
    bf.barrier()
    if bf.rank() == 0:
        until(lambda: bf.win_read_neighbor("x", 1, require_mutex=False)[0] == 7, "the first put")
        read.set()
        assert bf.win_update("x", 0.0, {1: 1.0}, require_mutex=True)[0] == 8


@on(*TWO)
def test_an_update_that_requires_the_mutex_waits_for_the_writer(world, tmp_path):
    """win_update sees the last put of the writer that held this rank's slot."""
    world.run(updates_wait, tmp_path)


@on(*TWO)
@on_each_rank
def test_a_thread_that_has_it_may_take_it_again():
    """Within a thread the mutex is reentrant, and it is free after the outermost block."""
    make()
    bf.barrier()
    peer = 1 - bf.rank()
    for _ in range(3):
        with bf.win_mutex("x"), bf.win_mutex("x", ranks=[peer]):
            bf.win_put(torch.ones(3), "x", require_mutex=True)
        with bf.win_mutex("x", for_self=True):
            bf.win_update_then_collect("x")
            bf.win_get("x", require_mutex=True)
    bf.barrier()
    with bf.win_mutex("x", for_self=bf.rank() == 0):  # both are free again
        pass
    bf.barrier()


@on(*TWO)
@on_each_rank
def test_threads_of_a_rank_exclude_each_other():
    """Never are two threads of a rank inside win_mutex of one window at the same time.

    Two threads of rank 0 and rank 1 take turns; nobody is in there together.
    """
    make()
    bf.barrier()
    context, inside, worst = bf.current(), [], []

    def body():
        from asyncddp.context.context import use

        with use(context):
            for _ in range(20):
                with bf.win_mutex("x"):
                    inside.append(1)
                    time.sleep(0.001)
                    worst.append(len(inside))
                    inside.pop()

    others = [threading.Thread(target=body) for _ in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    bf.barrier()
    assert worst == [1] * 40


def too_late(folder):
    """Rank 0 gives up waiting; the slot that it is granted later is not its own."""
    make()
    given_up, given_back = FileEvent(folder / "given up"), FileEvent(folder / "given back")
    bf.barrier()
    window = windows_of(bf.current()).find("test", "x")
    if bf.rank() == 1:
        with bf.win_mutex("x", for_self=True):
            bf.barrier()
            given_up.wait()
        bf.barrier()
        with bf.win_mutex("x", for_self=True):  # nobody has it: else the deadline would pass
            bf.barrier()
            time.sleep(0.4)
            given_back.set()
        bf.barrier()
        return
    bf.barrier()
    with deadline_of(1.0, 0.9), pytest.raises(bf.WaitTimeoutError) as caught:
        bf.win_put(torch.ones(3), "x", dst_weights=[1], require_mutex=True)
    assert "rank 0: the mutex of window 'x' at rank 1 was not done in " in str(caught.value)
    assert "missing: rank 1" in str(caught.value)
    given_up.set()
    bf.barrier()
    bf.barrier()
    with bf.win_mutex("x", ranks=[1]):
        assert given_back.is_set(), "rank 1 has it"
    assert not window.mutex._granted
    bf.barrier()


@on(*TWO)
def test_who_gives_up_waiting_does_not_get_it_later(world, tmp_path):
    """After a WaitTimeoutError no grant is kept, and a new request waits its turn."""
    world.run(too_late, tmp_path)


@on_each_rank(ranks=2, settings={"timeout": 1.0})
def test_who_waits_for_another_thread_of_its_rank_is_told_at_the_deadline():
    """A wait for a mutex that another thread of the rank holds times out, and says so."""
    make()
    held, over = threading.Event(), threading.Event()
    context = bf.current()

    def body():
        from asyncddp.context.context import use

        with use(context), bf.win_mutex("x"):
            held.set()
            over.wait(60)

    thread = threading.Thread(target=body)
    thread.start()
    assert held.wait(60)
    try:
        with pytest.raises(bf.WaitTimeoutError, match="another thread of this rank holds it"):
            bf.win_put(torch.ones(3), "x", require_mutex=True)
    finally:
        over.set()
        thread.join()
    with bf.win_mutex("x"):
        pass


@on(*TWO)
@on_each_rank
def test_an_error_inside_gives_it_back():
    """An exception inside of win_mutex releases it, and other ranks can acquire it."""
    make()
    bf.barrier()
    if bf.rank() == 0:
        with pytest.raises(ZeroDivisionError), bf.win_mutex("x"):
            raise ZeroDivisionError
    bf.barrier()
    with bf.win_mutex("x", for_self=True):  # else the deadline would pass
        pass
    bf.barrier()
