"""Messages by NCCL: both sides enter the same groups, in whatever order messages are begun."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import pytest
import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.transport.cuda.nccl import communicator
from asyncddp.transport.cuda.nccl import leader_follower as nccl_sides
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


STAGED, BY_NCCL = [(0, 2), (1, 3)], [(0, 3), (1, 2)]


def in_a_ring(transport):
    """Ranks 0 and 1 wait for staged messages of 2 and 3, which wait for theirs by NCCL."""
    rank, streams, base = transport.rank, transport.streams, transport.base
    (staged,), (by_nccl,) = (
        [sum(pair) - rank for pair in pairs if rank in pair] for pairs in (STAGED, BY_NCCL)
    )
    for peer in (by_nccl, staged):
        sending = transport.isend(torch.ones(1), peer, 0)
        transports.finish_all(transport, [transport.irecv(torch.zeros(1), peer, 0), sending])
        base.barrier(SECONDS)
    streams.step = lambda: None  # the device does nothing until all messages are begun
    base.barrier(SECONDS)
    source, target = (staged, by_nccl) if rank < 2 else (by_nccl, staged)
    sending = transport.isend(torch.ones(1), target, 1)
    base.barrier(SECONDS)
    arriving = transport.irecv(torch.zeros(1), source, 1)
    base.barrier(SECONDS)
    streams.__dict__.pop("step", None)
    base.barrier(SECONDS)
    for request in (arriving, sending):
        deadline = time.monotonic() + SECONDS
        while not request.done():
            assert time.monotonic() < deadline, f"rank {rank} waits for rank {source} for ever"
    return [peer for peer, pair in transport.pairs._pairs.items() if pair.staged]


def test_staged_messages_and_those_by_nccl_go_on_while_a_rank_waits_for_either(monkeypatch):
    """A wait for a staged message launches what peers send by NCCL, who stage for others."""
    monkeypatch.setattr(communicator, "_DEFAULT_BUDGET", 1)
    assert NcclWorld(4).run_bare(in_a_ring) == [[2], [3], [0], [1]]


def under_stress(transport, seed, rounds=4):
    """Messages with all ranks and sums, begun in an order of this rank's own, with pauses.

    What is sent in a round is what came in the round before, which the device may yet have to do.
    """
    draw, streams = random.Random(100 * seed + transport.rank), transport.streams
    peers = sorted(set(range(transport.size)) - {transport.rank})
    data, kept = torch.full((100,), float(transport.rank)), []
    for number in range(rounds):
        outs, total = {peer: torch.zeros(100) for peer in peers}, data.clone() * 0
        streams.copy(total, data, StreamRole.COMPUTE)
        begin = [
            *(partial(transport.isend, data, peer, number) for peer in peers),
            *(partial(transport.irecv, outs[peer], peer, number) for peer in peers),
            partial(transport.iallreduce, total),
        ]
        draw.shuffle(begin)
        pending = []
        for one in begin:
            pending.append(one())
            time.sleep(draw.random() * 1e-3)
            pending[draw.randrange(len(pending))].done()
        while pending:
            pending = [request for request in pending if not request.done()]
            transport.watch(SECONDS)
        kept.append((data, outs, total))
        data = torch.zeros(100)
        streams.copy(data, outs[peers[number % len(peers)]], StreamRole.COMPUTE)
    transport.barrier(SECONDS)
    while transport.watch(SECONDS):
        pass
    expected = [float(rank) for rank in range(transport.size)]
    for number, (_, outs, total) in enumerate(kept):
        assert {peer: out[0].item() for peer, out in outs.items()} == {
            peer: expected[peer] for peer in peers
        }
        assert total[0].item() == sum(expected)
        others = [[r for r in range(transport.size) if r != rank] for rank in range(transport.size)]
        expected = [expected[ranks[number % len(ranks)]] for ranks in others]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hardware_queues", [8, communicator.HARDWARE_QUEUES])
def test_ranks_under_stress_do_not_wait_for_each_other_for_ever(hardware_queues, seed, monkeypatch):
    """As many pairs are opened as there are hardware queues for; what is left is staged."""
    fitting = min(7, hardware_queues - communicator._OTHER_STREAMS)
    monkeypatch.setattr(communicator, "_DEFAULT_BUDGET", fitting)
    world = NcclWorld(8, seed, hardware_queues=hardware_queues)
    world.run_bare(under_stress, seed)


@pytest.mark.parametrize("seed", range(2))
def test_streams_that_share_hardware_queues_would_wait_in_a_circle(seed):
    """With a communicator for every pair and 8 queues the same stress ends in a deadlock."""
    with pytest.raises(Exception, match="ranks wait in a circle"):
        NcclWorld(8, seed, hardware_queues=8).run_bare(under_stress, seed)


def exchange(transport, ways, leader_posted=None):
    """Send to each other, or one way only; how long it took.

    Rank 1 begins once the leader, rank 0, has posted both where ``leader_posted`` is given: else
    the leader may launch its send before its receive is posted.
    """
    if transport.rank == 1 and leader_posted is not None:
        leader_posted.wait(SECONDS)
    begun, transfers, out = time.monotonic(), [], torch.zeros(5)
    if transport.rank in ways:
        transfers.append(
            transport.isend(torch.full((5,), transport.rank + 1.0), 1 - transport.rank, 3)
        )
    if 1 - transport.rank in ways:
        transfers.append(transport.irecv(out, 1 - transport.rank, 4 - 1))
    if leader_posted is not None:
        leader_posted.set()
    transports.finish_all(transport, transfers)
    return out[0].item(), time.monotonic() - begun


def test_an_exchange_both_ways_is_one_group(monkeypatch):
    """A send each way between two ranks is one NCCL group on each of them."""
    monkeypatch.setattr(nccl_sides, "_GROUPING_DELAY", 5.0)
    world = NcclWorld(2)
    (one, _), (two, _) = world.run_bare(exchange, (0, 1), threading.Event())
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
    transport.streams.copy(data, torch.full((1000,), transport.rank + 1.0), StreamRole.COMPUTE)
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
