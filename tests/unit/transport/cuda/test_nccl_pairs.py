"""Messages by NCCL: both sides enter the same groups, in whatever order messages are begun."""

from __future__ import annotations

import random
import time

import pytest
import torch

from asyncddp.tensors.dtypes import DTYPES
from asyncddp.transport.cuda.nccl import communicator
from asyncddp.transport.cuda.nccl import leader_follower as nccl_sides
from asyncddp.transport.cuda.nccl import point_to_point as nccl_pairs
from tests.conformance import test_transports as transports
from tests.support.nccl_world import NcclWorld

SECONDS = 60.0


def plan(size, seed):
    """For each ordered pair of ranks and each tag, dtypes and lengths of its messages in order."""
    draw = random.Random(seed)
    found = {}
    for sender in range(size):
        for receiver in set(range(size)) - {sender}:
            for tag in draw.sample(range(100), 3):
                messages = []
                for _ in range(draw.randint(1, 4)):
                    dtype = draw.choice(list(DTYPES))
                    most = draw.choice([0, 1, 100, 10_000, (1 << 20) // dtype.itemsize])
                    messages.append((dtype, draw.randint(0, most)))
                found[sender, receiver, tag] = messages
    return found


def content(key, number, dtype, length):
    return transports.noise(length, hash((*key, number)) % 10_000, dtype)


def at_random(transport, seed):
    """Begin all messages of a plan in an order of this rank's own, looking at some in between."""
    draw = random.Random(1000 * seed + transport.rank)
    lines = {
        k: list(enumerate(v))
        for k, v in plan(transport.size, seed).items()
        if transport.rank in k[:2]
    }
    transfers, expected = [], []
    while lines:
        key = draw.choice(list(lines))
        number, (dtype, length) = lines[key].pop(0)
        lines = {k: v for k, v in lines.items() if v}
        sender, receiver, tag = key
        if sender == transport.rank:
            transfers.append(transport.isend(content(key, number, dtype, length), receiver, tag))
        else:
            out = torch.zeros(length, dtype=dtype)
            expected.append((out, content(key, number, dtype, length)))
            transfers.append(transport.irecv(out, sender, tag))
        if draw.random() < 0.3:
            draw.choice(transfers).done()
    draw.shuffle(transfers)
    transports.finish_all(transport, transfers)
    for out, wanted in expected:
        assert torch.equal(out, wanted)
    return len(transfers)


@pytest.mark.parametrize("seed", range(6))
def test_messages_of_all_tags_dtypes_and_sizes_in_random_orders(seed):
    """Messages between 4 ranks arrive right whatever order each begins them in."""
    world = NcclWorld(4, seed)
    assert sum(world.run_bare(at_random, seed)) == 2 * sum(map(len, plan(4, seed).values()))
    assert {kind for _, kinds in world.nccl.groups for kind in kinds} >= {"send", "recv"}


@pytest.mark.parametrize("seed", range(2))
def test_peers_for_whom_there_is_no_room_are_staged(seed, monkeypatch):
    """Two kernels fit on a device: the group's, and that of the one pair that is opened."""
    monkeypatch.setattr(communicator, "_DEFAULT_BUDGET", 1)
    world = NcclWorld(4, seed, room=2)
    world.run_bare(at_random, seed)
    pairs = [comm.group for module in world.nccl.modules.values() for comm in module.made]
    assert len({group.name for group in pairs if group.size == 2}) <= 2


def exchange(transport, ways):
    """Send to each other, or one way only; how long it took."""
    begun, transfers, out = time.monotonic(), [], torch.zeros(5)
    if transport.rank in ways:
        transfers.append(
            transport.isend(torch.full((5,), transport.rank + 1.0), 1 - transport.rank, 3)
        )
    if 1 - transport.rank in ways:
        transfers.append(transport.irecv(out, 1 - transport.rank, 4 - 1))
    transports.finish_all(transport, transfers)
    return out[0].item(), time.monotonic() - begun


def test_an_exchange_both_ways_is_one_group(monkeypatch):
    """A send each way between two ranks is one NCCL group on each of them."""
    monkeypatch.setattr(nccl_sides, "_GROUPING_DELAY", 5.0)
    world = NcclWorld(2)
    (one, _), (two, _) = world.run_bare(exchange, (0, 1))
    assert (one, two) == (2.0, 1.0)
    groups = [(rank, sorted(kinds)) for rank, kinds in world.nccl.groups if "send" in kinds]
    first, second = [groups[k : k + 2] for k in (0, 2)]
    assert sorted(first) == sorted(second) == [(0, ["recv", "send"]), (1, ["recv", "send"])]


@pytest.mark.parametrize("sender", [0, 1])
def test_what_goes_one_way_waits_for_nothing(sender, monkeypatch):
    """A message one way is launched alone, without the delay that groups both ways."""
    monkeypatch.setattr(nccl_sides, "_GROUPING_DELAY", 60.0)
    world = NcclWorld(2)
    results = world.run_bare(exchange, (sender,))
    assert results[1 - sender][0] == sender + 1.0
    assert max(seconds for _, seconds in results) < 30.0
    assert (sender, ["send"]) in world.nccl.groups


def nothing(transport):
    before = torch.empty(0)
    sending = transport.isend(before, 1 - transport.rank, 0)
    transport.receive(torch.empty(0), 1 - transport.rank, 0, SECONDS)
    transport.finish(sending, SECONDS, "send")


def test_no_bytes_take_no_call_of_nccl():
    """Empty messages complete without an NCCL call beyond the one that connects the pair."""
    world = NcclWorld(2)
    world.run_bare(nothing)
    assert [kinds for _, kinds in world.nccl.groups if "send" in kinds] == [["send", "recv"]] * 2, (
        "only the exchange in which the two are connected"
    )


def to_itself(transport):
    out = torch.zeros(3)
    sending = transport.isend(torch.ones(3), transport.rank, 0)
    transport.receive(out, transport.rank, 0, SECONDS)
    transport.finish(sending, SECONDS, "send")
    return out.tolist()


def test_a_rank_sends_to_itself():
    """A rank receives what it sends to itself."""
    assert NcclWorld(2).run_bare(to_itself) == [[1.0] * 3] * 2


def late(transport):
    """What is sent is made late, by what was queued before."""
    data, out, peer = torch.zeros(1000), torch.zeros(1000), 1 - transport.rank
    transport.streams.copy(
        data, torch.full((1000,), transport.rank + 1.0), nccl_pairs.StreamRole.COMPUTE
    )
    sending = transport.isend(data, peer, 0)
    del data
    transport.receive(out, peer, 0, SECONDS)
    transport.finish(sending, SECONDS, "send")
    return out[0].item()


@pytest.mark.parametrize("seed", range(5))
def test_messages_come_after_the_work_that_was_queued_before_them(seed):
    """A message carries what the work queued before it makes, though that ends later."""
    assert NcclWorld(2, seed).run_bare(late) == [2.0, 1.0]


def dropped(transport):
    """Rank 1 receives what lies on no device of NCCL's; the next message comes as ever."""
    if transport.rank == 0:
        for number in (1.0, 2.0):
            transport.send(torch.full((4,), number), 1, 0, SECONDS)
        return None
    out = torch.zeros(4)
    transport.receive(torch.empty(4, device="meta"), 0, 0, SECONDS)
    transport.receive(out, 0, 0, SECONDS)
    return out.tolist()


def test_what_is_received_elsewhere_is_dropped():
    """A receive into no device of NCCL's drops its message, and the next arrives right."""
    assert NcclWorld(2).run_bare(dropped)[1] == [2.0] * 4
