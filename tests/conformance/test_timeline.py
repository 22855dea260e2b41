"""The timeline's laws on every transport."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import on
from tests.support.timelines import arrows, assert_balanced, assert_nested, read, spans

WORLDS = on("loopback-4", "mpi-2", "shared_memory-2", "shared_memory-4")


def verbs():
    """Small and large, blocking and not, in place and not, through windows."""
    bf.set_topology(topology.exponential_two(bf.size()))
    small, large = torch.ones(4), torch.ones(400_000)
    shared = bf.empty_shared((400_000,)).fill_(1.0)
    for _ in range(4):
        bf.neighbor_allreduce(small, name="small")
        bf.neighbor_allreduce(large, name="large")
        bf.neighbor_allreduce_(shared, name="shared")
        bf.neighbor_allreduce_nonblocking(small, name="later").wait()
    bf.set_topology(topology.one_peer_exponential(bf.size()))
    for _ in range(6):
        bf.neighbor_allreduce(small, name="small")
        bf.neighbor_allreduce_(large, name="large")
    bf.neighbor_allgather(small)
    bf.allreduce(large)
    bf.set_topology(topology.ring(bf.size()))
    bf.win_create(small, "small")
    for _ in range(3):
        bf.win_put(small, "small")
        bf.win_accumulate(small, "small")
        bf.win_flush()
        bf.barrier()
        bf.win_update("small")
        bf.barrier()
    bf.win_get("small")
    with bf.timeline_context("batch", "LOAD"):
        bf.timeline_start_activity("batch", "NEVER ENDED")
    bf.win_free()


@pytest.fixture
def files(world, tmp_path):
    """What each rank has written of :func:`verbs`."""
    world.run(verbs, settings={"timeline": f"{tmp_path}/"})
    return [read(tmp_path / f"rank{rank}.json") for rank in range(world.size)]


@WORLDS
def test_the_laws_of_a_timeline(files):
    """Spans nest, arrows have both ends, bytes that are sent are received, nothing is left out."""
    size = len(files)
    sent, received = {}, {}
    for rank, events in enumerate(files):
        assert {event["pid"] for event in events} == {rank}
        assert_nested(events)
        assert_balanced(events)
        sent.update({(rank, key): span for key, span in arrows(events, "s").items()})
        received.update({(rank, key): span for key, span in arrows(events, "f").items()})
    assert received
    for (rank, key), span in received.items():
        source = span["args"]["peer"]
        origin = sent[source, key]
        assert origin["args"]["peer"] == rank
        assert origin["args"]["bytes"] == span["args"]["bytes"]
        assert origin["args"]["name"] == span["args"]["name"]
    for rank, events in enumerate(files):
        averages = [s for s in arrows(events, "f").values() if s["args"]["name"] == "large"]
        neighbors = set(topology.exponential_two(size).predecessors(rank)) - {rank}
        assert len(averages) == 4 * len(neighbors) + 6


@WORLDS
def test_what_a_rank_says_of_itself_and_of_its_calls(files):
    """Identity, clock, and each call once, with its bytes."""
    for rank, events in enumerate(files):
        facts = {event["name"]: event for event in events if event["ph"] == "M"}
        identity = facts["asyncddp.rank"]["args"]
        assert (identity["rank"], identity["size"], identity["version"]) == (rank, len(files), 1)
        clock = facts["asyncddp.clock"]
        assert clock["ts"] > 0
        assert abs(clock["args"]["offset"]) <= clock["args"]["error"] + 0.001
        assert facts["process_sort_index"]["args"] == {"sort_index": rank}
        calls = spans(events, "enqueue", "ENQUEUE_NEIGHBOR_ALLREDUCE")
        assert len(calls) == 4 * 4 + 6 * 2
        nbytes = {call["args"]["name"]: call["args"]["bytes"] for call in calls}
        large = 4 * 400_000
        assert nbytes == {"small": 16, "large": large, "shared": large, "later": 16}
        assert {call["args"]["op"] for call in calls} == {"MPI_NEIGHBOR_ALLREDUCE"}
        assert {call["tid"] for call in calls} == {2}
        mixed = [one for one in spans(events, "mix") if one["args"]["name"] == "large"]
        assert sum(one["args"]["bytes"] for one in mixed) == 10 * large
        for name, count in (("WIN_PUT", 3), ("WIN_ACCUMULATE", 3), ("WIN_UPDATE", 3)):
            assert len(spans(events, "window", name)) == count
        assert spans(events, "window", "WIN_GET")
        assert spans(events, "collective")


def waits_for_a_straggler():
    """Rank 0 comes late."""
    import time

    x = torch.ones(4)
    bf.set_topology(topology.ring(bf.size()))
    for _ in range(4):
        bf.neighbor_allreduce(x, name="x")
    bf.barrier()
    if bf.rank() == 0:
        time.sleep(0.3)
    bf.neighbor_allreduce(x, name="x")


@on("loopback-2", "mpi-2", "shared_memory-2")
def test_a_wait_names_whom_it_was_for(world, tmp_path):
    """And lasts as long as the straggler was late."""
    world.run(waits_for_a_straggler, settings={"timeline": f"{tmp_path}/"})
    waits = spans(read(tmp_path / "rank1.json"), "wait", "neighbor_allreduce")
    longest = max(waits, key=lambda wait: wait["dur"])
    assert longest["dur"] > 0.2e6
    assert longest["args"]["for"] == [0]
