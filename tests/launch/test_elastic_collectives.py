"""Collectives in slots of shared memory, in elastic runs: a death ends none with two results."""

from __future__ import annotations

import pytest

DIES = """
import os, signal, sys
import asyncddp as bf
import torch
from asyncddp.context import current
from asyncddp.shm.collective_slots import CollectiveSlots

bf.init()
rank, dead, last, when = bf.rank(), int(sys.argv[1]), 40, sys.argv[2]
post = CollectiveSlots.post

def post_and_die(slots, step, digest, data=None):
    if when == "after":
        post(slots, step, digest, data)
    os.kill(os.getpid(), signal.SIGKILL)

sums = []
for number in range(2 * last):
    if rank == dead and number == last:
        CollectiveSlots.post = post_and_die
    x = torch.tensor([2 ** rank])
    sums.append((bf.allreduce_ if number % 2 else bf.allreduce)(x, average=False).item())
large = bf.allreduce(torch.ones(1 << 19), average=False)[-1].item()
groups = [one for one in current().engine.matcher.slots if "view" in one]
sys.stdout.write(f"{rank} {sums[:last]} {sums[last]} {sums[last + 1:]} {large} {groups}\\n")
"""


@pytest.mark.parametrize(("when", "dead"), [("before", 0), ("after", 2)])
def test_what_the_dead_rank_has_posted_is_in_the_sum_of_all(run, when, dead):
    """Every survivor has the same sums, and later ones go through slots of the survivors."""
    ended = run("--elastic", "-np", "4", run.script(DIES), str(dead), when)
    assert ended.code == 0, ended
    living = 15 - 2**dead
    last = living if when == "before" else 15
    said = f"{[15] * 40} {last} {[living] * 39} 3.0 ['<collective of view 1>']"
    expected = [f"{rank} {said}" for rank in range(4) if rank != dead]
    assert sorted(ended.stdout.splitlines()) == expected, ended.stderr


ENDS_LATE = """
import os, signal, sys, threading, time
import asyncddp as bf
import torch
from asyncddp.context import current
from asyncddp.engine.membership_changes import MembershipChanges
from asyncddp.shm.collective_slots import CollectiveSlots

bf.init()
rank, prepared, ended = bf.rank(), threading.Event(), threading.Event()
x = torch.tensor([2 ** rank])
for _ in range(20):
    bf.allreduce(x, average=False)
receive, post = MembershipChanges.receive, CollectiveSlots.post

def receive_late(changes, peer, message):
    prepared.set()
    assert ended.wait(20)
    receive(changes, peer, message)

def post_and_die(slots, step, digest, data=None):
    post(slots, step, digest, data)
    while slots.joined(step) != [0]:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if rank == 2:
    CollectiveSlots.post = post_and_die
if rank == 1:
    MembershipChanges.receive = receive_late
    MembershipChanges.suspect = lambda *facts, certified: None  # rank 0 is to be the first
    assert prepared.wait(20)
first = bf.allreduce(x, average=False).item()
ended.set()
later = bf.allreduce(x, average=False).item()
sys.stdout.write(f"{rank} {first} {later} {list(bf.view().members)}\\n")
"""


def test_a_rank_that_has_promised_ends_what_another_ends_before_its_promise(run):
    """Rank 0 has posted and waits for the next view, and only then rank 1 finds all posts."""
    ended = run("--elastic", "-np", "3", *run.warm(ENDS_LATE))
    assert ended.code == 0, ended
    assert sorted(ended.stdout.splitlines()) == ["0 7 3 [0, 1]", "1 7 3 [0, 1]"], ended


PLANNED_BEFORE = """
import os, signal, sys, time
import asyncddp as bf
from asyncddp.context import current

bf.init()
rank, engine = bf.rank(), current().engine
bf.allgather_object(rank)
lock = engine.submit_lock

class TakenLate:
    # as by a thread that gets no processor until the next view has begun
    def __enter__(self):
        engine.submit_lock = lock
        while bf.view().number == 0:
            time.sleep(0.01)
        return lock.__enter__()

    def __exit__(self, *error):
        return lock.__exit__(*error)

if rank == 2:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    engine.submit_lock = TakenLate()
objects = [bf.allgather_object(rank) for _ in range(3)]
sys.stdout.write(f"{rank} {objects}\\n")
"""


def test_what_was_planned_before_a_death_begins_among_the_survivors(run):
    """A rank has found its slots and planned its call, and another view begins before the call."""
    ended = run("--elastic", "-np", "4", run.script(PLANNED_BEFORE))
    assert ended.code == 0, ended
    expected = [f"{rank} {[[0, 1, 3]] * 3}" for rank in (0, 1, 3)]
    assert sorted(ended.stdout.splitlines()) == expected, ended.stderr
