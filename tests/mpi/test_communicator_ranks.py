"""What the ranks of a communicator tell each other of themselves when a world is opened."""

from __future__ import annotations

import os

import pytest

import asyncddp as bf
from asyncddp.transport.mpi.communicator_pair import allgather_records
from tests.support import on

CORES = sorted(os.sched_getaffinity(0))


def gathered(lengths):
    comm = bf.current().transport._pair.comm
    return allgather_records(comm, "x" * lengths[bf.rank()], str)


@on("mpi-4")
@pytest.mark.parametrize("long", [0, 100, 117, 118, 119, 120, 121, 5000])
def test_records_of_every_length_arrive_in_rank_order(world, long):
    """Also where only one rank's record is too long to go along with its length."""
    lengths = [1] * world.size
    lengths[-1] = long
    assert world.run(gathered, lengths) == [["x" * length for length in lengths]] * world.size


def shares_cores(cores):
    """What the transport finds where each rank may use these cores alone."""
    transport, before = bf.current().transport, os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[bf.rank()])
    try:
        assert transport.machine_id() == 0
    finally:
        os.sched_setaffinity(0, before)
    return transport.cores_shared


@on("mpi-2")
@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
def test_ranks_share_cores_where_they_outnumber_all_that_they_may_use(world):
    """A core for each is enough, bound or not; one core for both is not."""
    first, second = CORES[:2]
    assert world.run(shares_cores, [{first}, {second}]) == [False, False]
    assert world.run(shares_cores, [{first, second}] * 2) == [False, False]
    assert world.run(shares_cores, [{first}, {first}]) == [True, True]
