"""A run whose rank 2 is late: its timeline names the rank, from the recorder to the report."""

from __future__ import annotations

import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.timeline.merged_trace import open_traces
from asyncddp.timeline.report.timeline_report import build_report
from asyncddp.timeline.report.trace_spans import collect_spans

RANKS, STRAGGLER, STEPS = 4, 2, 25


def train(method: str) -> None:
    """Steps before each of which one rank sleeps, as if it read from a slow disk."""
    torch.manual_seed(bf.rank())
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if method == "neighbours":
        ring = topology.ring(RANKS)
        optimizer = bf.DistributedNeighborAllreduceOptimizer(optimizer, model=model, topology=ring)
    else:
        optimizer = bf.DistributedGradientAllreduceOptimizer(optimizer, model=model)
    for _ in range(STEPS):
        if bf.rank() == STRAGGLER:
            time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def recorded(out, method):
    """The timelines of such a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCDDP_TIMELINE", f"{out}/")
        with bf.local_world(RANKS) as world:
            world.run(train, method)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("out"), "neighbours")


@pytest.fixture(scope="module")
def found(folder):
    return build_report(collect_spans(open_traces([folder]).events()))


def test_the_straggler_holds_up_the_others_and_has_most_to_do(found):
    """The rank that sleeps before each step is both the slowest and the one that holds up."""
    assert found.holds_up == found.slowest == STRAGGLER


def test_its_neighbours_wait_for_it_and_it_waits_for_nobody(found):
    """On a ring 1 and 3 have it as a neighbour; 0 waits for those that wait."""
    waits = {one.rank: dict(one.waited or ()) for one in found.ranks}
    for neighbour in (1, 3):
        assert max(waits[neighbour], key=waits[neighbour].get) == STRAGGLER
        assert waits[neighbour][STRAGGLER] > sum(waits[STRAGGLER].values())


def test_its_time_goes_elsewhere_and_that_of_the_others_into_waiting(found):
    """The straggler's sleep counts as other time; each other rank has more exposed time."""
    straggler = found.ranks[STRAGGLER]
    assert straggler.steps == STEPS - 1
    assert straggler.step >= 20
    assert straggler.other >= 20
    assert all(one.exposed > straggler.exposed for one in found.ranks if one.rank != STRAGGLER)


def test_what_arrives_is_what_was_sent(folder):
    """Over all ranks, bytes received equal bytes sent."""
    found = build_report(collect_spans(open_traces([folder]).events()), skip=0)
    assert found.ranks[0].sent > 0
    assert sum(one.sent for one in found.ranks) == sum(one.received for one in found.ranks)


def test_every_message_has_both_ends(folder):
    """Each arrow of a recorded run has a start and an end, on two different ranks."""
    merge = open_traces([folder])
    events = [event for event in merge.events() if event["ph"] in "sf"]
    assert merge.arrows.dropped == 0
    assert merge.arrows.kept == len(events) / 2 > 0
    sides = {phase: [e for e in events if e["ph"] == phase] for phase in "sf"}
    for departure, arrival in zip(sides["s"], sides["f"], strict=True):
        assert departure["id"] == arrival["id"]
        assert departure["pid"] != arrival["pid"]


def test_no_time_is_negative(folder):
    """No event of a merged run has a negative time stamp."""
    assert min(event["ts"] for event in open_traces([folder]).events() if "ts" in event) >= 0


def test_the_straggler_holds_up_a_central_average_as_well(tmp_path):
    """There every rank notes that it waited for all the others."""
    found = build_report(collect_spans(open_traces([recorded(tmp_path, "all")]).events()))
    assert found.waited_for_most == found.holds_up == found.slowest == STRAGGLER
    for one in found.ranks:
        assert one.rank == STRAGGLER or one.waited[0][0] == STRAGGLER
