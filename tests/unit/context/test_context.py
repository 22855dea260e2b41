"""How a world starts and ends, what it knows of itself, and what it says when it is not there."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld, on

NOT_YET = (
    "asyncddp is not initialised: call asyncddp.init() first, or run inside "
    "asyncddp.local_world(n).run(...)"
)


@pytest.fixture
def alone():
    """A world of one rank in this process, without MPI."""
    bf.init(transport="loopback")
    yield
    bf.shutdown()


# before and after


@pytest.mark.parametrize(
    "call",
    [
        bf.rank,
        bf.size,
        bf.load_topology,
        bf.barrier,
        bf.barrier_nonblocking,
        lambda: bf.allreduce(torch.ones(1)),
        lambda: bf.allreduce_(torch.ones(1)),
        lambda: bf.neighbor_allreduce_nonblocking(torch.ones(1)),
        lambda: bf.broadcast_object(1),
        lambda: bf.set_topology(topology.ring(2)),
    ],
)
def test_before_init_everything_says_what_to_call(call):
    """Before ``init`` each call raises ``NotInitializedError`` with the two ways to begin."""
    assert not bf.is_initialized()
    with pytest.raises(bf.NotInitializedError) as caught:
        call()
    assert str(caught.value) == NOT_YET


def test_after_shutdown_as_well():
    """After ``shutdown`` no world is initialised, and verbs raise ``NotInitializedError``."""
    bf.init(transport="loopback")
    assert bf.is_initialized()
    bf.shutdown()
    assert not bf.is_initialized()
    with pytest.raises(bf.NotInitializedError, match="call asyncddp"):
        bf.barrier()


def test_shutdown_twice_and_without_init_is_harmless():
    """``shutdown`` does nothing where there is no world, before ``init`` and a second time."""
    bf.shutdown()
    bf.init(transport="loopback")
    bf.shutdown()
    bf.shutdown()


def test_init_twice_keeps_the_world_and_sets_a_topology(alone):
    """A second ``init`` keeps the context, and sets the topology that it is given."""
    context = bf.current()
    bf.init()
    assert bf.current() is context
    graph = topology.ring(1)
    bf.init(graph)
    assert bf.load_topology() is graph


def test_init_refuses_what_does_not_fit_with_reason():
    """``init`` with an unknown transport names the nearest one, and leaves no world."""
    with pytest.raises(bf.UnknownNameError, match=r"unknown transport 'lopback'.*'loopback'\?"):
        bf.init(transport="lopback")
    assert not bf.is_initialized()


def test_the_hook_for_uncaught_errors_goes_with_the_world():
    """``init`` replaces ``sys.excepthook``, and ``shutdown`` restores it."""
    before = sys.excepthook
    bf.init(transport="loopback")
    assert sys.excepthook is not before
    bf.shutdown()
    assert sys.excepthook is before


def test_one_rank_alone(alone):
    """A world of one rank has no neighbours, one machine, and averages to its own value."""
    assert (bf.rank(), bf.size(), bf.local_rank(), bf.local_size()) == (0, 1, 0, 1)
    assert (bf.machine_rank(), bf.machine_size(), bf.is_homogeneous()) == (0, 1, True)
    assert bf.in_neighbor_ranks() == bf.out_neighbor_ranks() == []
    assert bf.neighbor_allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


def late_partner():
    """Rank 0 shuts down with an open handle; rank 1 comes to the verb later, and is told."""
    alone = {"self_weight": 1.0, "dst_weights": []}
    if bf.rank() == 0:
        handle = bf.neighbor_allreduce_nonblocking(
            torch.ones(1), **alone, src_weights={1: 1.0}, name="open"
        )
        bf.shutdown()
        with pytest.raises(bf.NotInitializedError) as caught:
            handle.wait()
        return str(caught.value)
    threading.Event().wait(0.3)
    with pytest.raises(bf.PeerError) as caught:
        bf.neighbor_allreduce(
            torch.ones(1), **{**alone, "dst_weights": [0]}, src_weights={}, name="open"
        )
    return str(caught.value)


@on("mpi-2")
def test_shutdown_ends_open_handles_and_tells_the_peers(world):
    """``shutdown`` fails open handles, and peers that come later get the reason and the rank."""
    first, second = world.run(late_partner)
    assert first == "neighbor_allreduce 'open' (use 0): shut down before its end"
    assert "neighbor_allreduce 'open' (use 0): shut down before its end" in second
    assert "rank 0" in second


def again_and_again():
    results = []
    for k in range(5):
        x = torch.tensor([float(bf.rank() + k)])
        results.append(bf.neighbor_allreduce(x, name="w").item())
        results.append(bf.allreduce(x, average=False).item())
        bf.shutdown()
        assert not bf.is_initialized()
        bf.init()
    return results


@on("mpi-4")
def test_a_world_can_be_started_again(world):
    """Nothing of the old one reaches the new one."""
    n = world.size
    total = n * (n - 1) / 2
    results = world.run(again_and_again)
    assert [row[1::2] for row in results] == [[total + n * k for k in range(5)]] * n
    means = [sum(column) / n for column in zip(*(row[::2] for row in results), strict=True)]
    assert means == pytest.approx([total / n + k for k in range(5)])


def leaves_early():
    """Rank 0 has all it needs and goes; the others come late, and get its broadcast."""
    if bf.rank() == 0:
        return bf.broadcast(torch.tensor([7.0]), 0).item()
    threading.Event().wait(0.3 * bf.rank())
    return bf.broadcast(torch.tensor([0.0]), 0).item()


@on("loopback-4", "mpi-4")
def test_a_rank_that_has_given_its_share_may_leave(world):
    """A broadcast's root may leave; ranks that come later still get its value."""
    assert world.run(leaves_early) == [7.0] * 4


def needed_and_gone():
    if bf.rank() == 0:
        return None
    threading.Event().wait(0.2)
    with pytest.raises(bf.PeerLeftError) as caught:
        bf.neighbor_allreduce(torch.ones(1), name="w")
    return str(caught.value)


@on("loopback-2", "mpi-2")
def test_a_rank_that_is_needed_and_gone_is_named(world):
    """A verb that needs a rank that has left raises ``PeerLeftError`` with it and the remedy."""
    told = world.run(needed_and_gone)[1]
    why = "its function has returned" if world.transport == "loopback" else "it called shutdown()"
    assert told == (
        f"rank 1: neighbor_allreduce 'w' (use 0): rank 0 has left ({why}), but is needed; if ranks "
        "have different numbers of batches, put the training loop inside "
        "`with bf.join(optimizer):`"
    )


# topologies


def topologies():
    default = bf.load_topology()
    assert sorted(default.edges) == sorted(topology.exponential_two(bf.size()).edges)
    ring = topology.ring(bf.size(), style="right")
    bf.set_topology(ring)
    assert bf.load_topology() is ring
    n, me = bf.size(), bf.rank()
    assert bf.in_neighbor_ranks() == [(me - 1) % n]
    assert bf.out_neighbor_ranks() == [(me + 1) % n]
    schedule = topology.one_peer_exponential(n)
    bf.set_topology(schedule)
    assert bf.out_neighbor_ranks(1) == [(me + 2) % n]
    bf.set_topology()
    assert len(bf.in_neighbor_ranks()) == 2
    assert bf.load_machine_topology() is None
    with pytest.raises(topology.TopologyError) as caught:
        bf.set_topology(topology.ring(n + 1))
    assert len(bf.in_neighbor_ranks()) == 2, "a topology that was refused has replaced the old one"
    return str(caught.value)


@on("loopback-4", "mpi-4")
def test_topologies_are_set_loaded_and_checked(world):
    """A set topology gives the neighbours, None the default; another size is refused."""
    assert set(world.run(topologies)) == {
        "topology ring(5) is for 5 ranks, but there are 4: build it with n=4"
    }


# local worlds


def test_a_rank_s_error_reaches_the_caller_with_its_rank():
    """``run`` raises ``RankError`` with the rank that failed first, its error as the cause."""

    def case():
        if bf.rank() == 2:
            raise KeyError("lost")
        bf.barrier()

    with bf.local_world(4) as world, pytest.raises(bf.RankError) as caught:
        world.run(case)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(caught.value).startswith("rank 2 raised KeyError: 'lost' (then also rank")


def test_a_rank_that_exits_ends_its_world_not_the_process():
    """``sys.exit`` on a rank of a local world ends that rank; who needs it gets the reason."""

    def case():
        if bf.rank() == 1:
            sys.exit(3)
        bf.neighbor_allreduce(torch.ones(1))

    first, second = LoopbackWorld(2).outcomes(case)
    assert (second.error, second.message) == ("SystemExit", "3")
    assert first.error == "PeerLeftError"
    assert "rank 1 has left (it raised SystemExit: 3), but is needed" in first.message
    assert "bf.join" not in first.message


def test_a_local_world_runs_several_functions():
    """One local world runs function after function, with arguments and reused names."""
    with bf.local_world(3) as world:
        assert (
            world.run(lambda: bf.allreduce(torch.tensor([1.0]), average=False).item()) == [3.0] * 3
        )
        assert world.run(lambda k: bf.rank() * k, 2) == [0, 2, 4]
        assert world.run(lambda: bf.neighbor_allreduce(torch.ones(1), name="w").item()) == [1.0] * 3


def test_ranks_need_not_do_the_same_in_the_end():
    """A rank that returns early is gone for this function only."""

    def case(k):
        if bf.rank() == k:
            return None
        peers = [r for r in range(3) if r not in (k, bf.rank())]
        return bf.neighbor_allreduce(
            torch.ones(1),
            self_weight=0.5,
            src_weights=dict.fromkeys(peers, 0.5),
            dst_weights=peers,
            name=f"without {k}",
        ).item()

    with bf.local_world(3) as world:
        for k in range(3):
            assert world.run(case, k) == [None if r == k else 1.0 for r in range(3)]


def test_inside_a_local_world_init_and_shutdown_do_nothing():
    """Inside a local world ``init`` sets the topology only, and ``shutdown`` does nothing."""

    def case():
        bf.init(topology.ring(2))
        bf.shutdown()
        return bf.size(), bf.in_neighbor_ranks()

    assert LoopbackWorld(2).run(case) == [(2, [1]), (2, [0])]


def test_a_thread_of_the_user_s_own_is_no_rank():
    """Unless it is made one: it must not take another rank's place by accident."""
    told = []

    def ask():
        try:
            told.append(bf.rank())
        except bf.NotInitializedError as error:
            told.append(str(error))

    def case():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    LoopbackWorld(1).run(case)
    assert told == [NOT_YET]


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_needs_a_rank(size):
    """``local_world`` refuses sizes below 1."""
    with pytest.raises(bf.ArgumentError) as caught:
        bf.local_world(size)
    assert str(caught.value) == f"local_world: argument size: expected at least 1, got {size}"


def test_worlds_leave_no_threads_and_no_memory():
    """Ended local worlds leave no thread, and no contexts but the last one's."""
    before = threading.active_count()
    for _ in range(3):
        LoopbackWorld(4).run(bf.barrier)
    assert threading.active_count() == before
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is bf.Context]
    assert len(alive) <= 4, "worlds that have ended are kept"


def workers():
    found = [thread for thread in threading.enumerate() if "progress" in thread.name]
    return [(thread.name, thread.daemon) for thread in found]


def test_workers_are_daemons_named_after_their_rank():
    """Each rank of a local world has one progress thread, a daemon that is named after it."""
    found = LoopbackWorld(2).run(workers)[0]
    assert sorted(found) == [("asyncddp-progress-0", True), ("asyncddp-progress-1", True)]
