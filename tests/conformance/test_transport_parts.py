"""Groups that only their members make, and messages that are looked for among all ranks."""

from __future__ import annotations

import time

import torch

SECONDS = 20.0


def makes_parts_twice(transport):
    members = [rank for rank in reversed(range(transport.size)) if rank % 2 == 0]
    totals = []
    for tag in (5, 5):
        if transport.rank not in members:
            continue  # others do not take part
        part = transport.split_members(members, tag)
        assert (part.rank, part.size) == (members.index(transport.rank), len(members))
        x = torch.tensor([transport.rank])
        part.allreduce(x, SECONDS)
        totals.append(int(x))
        part.close()
    transport.barrier(SECONDS)
    return totals


def test_split_members_is_called_by_the_members_alone(world):
    """Their order is that of the list, and a second call makes another group."""
    found = world.run_bare(makes_parts_twice)
    even = [rank for rank in range(world.size) if rank % 2 == 0]
    assert found == [[sum(even)] * 2 if rank in even else [] for rank in range(world.size)]


def probes(transport):
    tag, received = 11, []
    if transport.rank:
        transport.send(torch.tensor([transport.rank]), 0, tag, SECONDS)
        return received
    assert transport.probe(tag + 1) is None
    deadline = time.monotonic() + SECONDS
    while len(received) < transport.size - 1 and time.monotonic() < deadline:
        source = transport.probe(tag)
        if source is not None:
            out = torch.zeros(1, dtype=torch.int64)
            transport.receive(out, source, tag, SECONDS)
            assert int(out) == source
            received.append(source)
    assert transport.probe(tag) is None
    return received


def test_probe_finds_the_sender_of_a_message_that_is_not_received(world):
    """Nothing is found for another tag, or once it is received."""
    found = world.run_bare(probes)
    assert sorted(found[0]) == list(range(1, world.size))
