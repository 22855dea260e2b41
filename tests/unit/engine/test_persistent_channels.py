"""Persistent channels: which names and signatures have ring buffers, and what is remembered."""

from __future__ import annotations

import os

import pytest
import torch
from msgspec.structs import replace

from asyncddp.engine import persistent_channels as module
from asyncddp.engine.messages import COLLECTIVE, ExchangeSignature, MatchKey
from asyncddp.engine.persistent_channels import PersistentChannelTable
from asyncddp.shm.arena import Arena
from asyncddp.shm.ring_header import header_words
from asyncddp.transport.base import SharedMemoryGroup

SIGNATURE = ExchangeSignature("verb", "float32", (3,))


@pytest.fixture
def ranks():
    """Ranks 0, 1 and 2, which see each other's memory; rank 3 lives elsewhere."""
    arenas = [Arena() for _ in range(3)]
    processes = dict.fromkeys(range(3), os.getpid())
    yield [
        PersistentChannelTable(SharedMemoryGroup(arena, processes), r)
        for r, arena in enumerate(arenas)
    ]
    for arena in arenas:
        arena.close()


def joined(ranks, name="w", signature=SIGNATURE, pairs=((0, 1), (1, 0))):
    """Channels under a name, as they are after rings were offered and attached."""
    targets = {rank: [] for pair in pairs for rank in pair}
    for sender, reader in pairs:
        targets[sender].append(reader)
    found = {
        rank: ranks[rank].find_or_open(MatchKey(name, 1), signature, to)
        for rank, to in targets.items()
    }
    for sender, reader in pairs:
        handle = ranks[sender].ring_to_offer(found[sender], reader)
        ranks[reader].attach_ring(found[reader], sender, handle)
        found[sender].readers.add(reader)
    return found


def test_a_name_has_a_channel_from_its_second_use_on(ranks):
    """The first use of a name opens no channel; later uses share the one of the second."""
    assert ranks[0].find_or_open(MatchKey("w", 0), SIGNATURE, [1]) is None
    channel = ranks[0].find_or_open(MatchKey("w", 1), SIGNATURE, [1])
    assert channel is not None
    assert channel.send_ring is not None
    assert ranks[0].find_or_open(MatchKey("w", 2), SIGNATURE, [1]) is channel
    assert ranks[0].get("w", SIGNATURE) is channel
    assert ranks[0].get("v", SIGNATURE) is None


def test_each_signature_of_a_name_has_a_channel_of_its_own(ranks):
    """Two signatures under one name have two channels with rings of their own."""
    one = ranks[0].find_or_open(MatchKey("w", 1), SIGNATURE, [1])
    other = ranks[0].find_or_open(MatchKey("w", 2), ExchangeSignature("verb", "float32", (4,)), [1])
    assert one is not other
    assert one.send_ring.handle != other.send_ring.handle
    assert ranks[0].find_all("w") == [one, other]


@pytest.mark.parametrize(
    ("key", "signature"),
    [
        (MatchKey(COLLECTIVE, 5), SIGNATURE),
        (MatchKey("w", 5), ExchangeSignature("verb", "float32", (None, 3))),
    ],
    ids=["a collective", "rows that differ"],
)
def test_some_exchanges_never_go_through_rings(ranks, key, signature):
    """Collectives and tensors with a dimension of any size have no channel."""
    assert ranks[0].find_or_open(key, signature, [1]) is None


def test_who_only_receives_has_no_send_ring(ranks):
    """Until it sends to a rank of its machine; a rank elsewhere needs none."""
    assert ranks[0].find_or_open(MatchKey("w", 1), SIGNATURE, []).send_ring is None
    assert ranks[0].find_or_open(MatchKey("w", 2), SIGNATURE, [3]).send_ring is None
    assert ranks[0].find_or_open(MatchKey("w", 3), SIGNATURE, [2, 3]).send_ring is not None


def test_a_tensor_without_elements_has_no_ring(ranks):
    """The channel of a tensor without elements has no ring."""
    assert (
        ranks[0]
        .find_or_open(MatchKey("w", 1), ExchangeSignature("verb", "float32", (2, 0)), [1])
        .send_ring
        is None
    )


def test_without_shared_memory_there_are_no_channels():
    """Without shared memory there are no channels, no handles and no unexpected tensors."""
    alone = PersistentChannelTable(None, 0)
    assert alone.find_or_open(MatchKey("w", 9), SIGNATURE, [1]) is None
    assert alone.handle_of(torch.ones(3)) is None
    assert alone.unexpected_tensors() == []


def test_tensors_beyond_the_largest_of_rings_go_by_message():
    """Where a group sets a limit, larger tensors have no channel."""
    arena = Arena()
    for largest, found in ((12, True), (11, False)):
        near = SharedMemoryGroup(arena, dict.fromkeys(range(2), os.getpid()), largest=largest)
        channel = PersistentChannelTable(near, 0).find_or_open(MatchKey("w", 1), SIGNATURE, [1])
        assert (channel is not None) == found
    arena.close()


@pytest.mark.parametrize(("limit", "value"), [("_MAX_RINGS", 2), ("_MAX_RING_BYTES", 1500)])
def test_there_is_an_end_to_rings(ranks, monkeypatch, limit, value, caplog):
    """What comes after it has a channel, and no ring; a line of the log says so, once."""
    monkeypatch.setattr(module, limit, value)
    rings = [
        ranks[0].find_or_open(MatchKey(f"w{k}", 1), SIGNATURE, [1]).send_ring for k in range(8)
    ]
    known = [send_ring is not None for send_ring in rings]
    assert known[0]
    assert not known[-1]
    assert known == sorted(known, reverse=True)
    count = sum(known)
    (told,) = caplog.messages
    assert told.startswith(
        f"rank 0: {count} names of tensors have ring buffers, of 0 MB; 'w{count}'"
    )


@pytest.mark.parametrize(
    ("memory", "number", "most"),
    [
        (64 << 30, 2, 1 << 30),
        (24 << 30, 2, 768 << 20),
        (24 << 30, 64, 1 << 28),
        (1 << 30, 2, 1 << 28),
    ],
)
def test_rings_of_all_ranks_take_a_part_of_the_memory(monkeypatch, memory, number, most):
    """A sixteenth for all ranks of the machine, at least 256 MB each and at most 1 GB."""
    monkeypatch.setattr(module, "memory_limit", lambda: memory)
    arena = Arena()
    near = SharedMemoryGroup(arena, dict.fromkeys(range(number), os.getpid()))
    table = PersistentChannelTable(near, 0)
    signature = replace(SIGNATURE, shape=(1 << 18,), dtype="float32")  # rings of two megabytes
    found = 0
    while table.find_or_open(MatchKey(f"w{found}", 1), signature, [1]).send_ring is not None:
        found += 1
    arena.close()
    assert found == most // ((2 << 20) + 8 * header_words(number))


def test_a_system_without_memory_means_no_ring(ranks, monkeypatch):
    """If memory is refused, the channel has no ring, and a later use gets one."""

    def refuses(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuses)
    assert ranks[0].find_or_open(MatchKey("w", 1), SIGNATURE, [1]).send_ring is None
    monkeypatch.undo()
    assert ranks[0].find_or_open(MatchKey("w", 2), SIGNATURE, [1]).send_ring is not None


def test_a_ring_is_offered_until_a_peer_reads_it(ranks):
    """A ring is offered to each peer of the machine until that one reads it."""
    channel = ranks[0].find_or_open(MatchKey("w", 1), SIGNATURE, [1])
    assert ranks[0].ring_to_offer(channel, 1) == channel.send_ring.handle
    assert ranks[0].ring_to_offer(channel, 3) is None
    assert ranks[0].ring_to_offer(None, 1) is None
    channel.readers.add(1)
    assert ranks[0].ring_to_offer(channel, 1) is None
    assert ranks[0].ring_to_offer(channel, 2) == channel.send_ring.handle


def test_a_channel_serves_who_is_reached_both_ways(ranks):
    """A channel serves if rings of all sources are attached and all targets read its own."""
    found = joined(ranks)
    assert found[0].serves([1], [1])
    assert found[0].serves([], [1])
    assert found[0].serves([1], [])
    assert not found[0].serves([1, 2], [1])
    assert not found[0].serves([1], [1, 2])
    listener = ranks[2].find_or_open(MatchKey("w", 1), SIGNATURE, [])
    assert listener.serves([], [])
    assert not listener.serves([], [0])


def test_what_one_sends_the_other_reads(ranks):
    """What a rank sends through its ring is read whole at its peer, not the other way."""
    found = joined(ranks)
    found[0].send_ring.try_send(2, (1,), torch.tensor([1.0, 2.0, 3.0]))
    assert found[1].receive_rings[0].read_whole(2).tolist() == [1.0, 2.0, 3.0]
    assert found[0].receive_rings[1].read_whole(2) is None


def test_a_retired_ring_is_offered_anew_with_other_memory(ranks):
    """A peer that still polls the old ring sees nothing new there."""
    found = joined(ranks)
    old = found[0].send_ring.handle
    ranks[0].retire_ring(found[0])
    assert not found[0].serves([], [1])
    again = ranks[0].find_or_open(MatchKey("w", 3), SIGNATURE, [1])
    assert again is found[0]
    assert again.send_ring.handle != old
    assert ranks[0].ring_to_offer(again, 1) == again.send_ring.handle
    again.send_ring.try_send(3, (1,), torch.ones(3))
    assert found[1].receive_rings[0].read_whole(3) is None
    ranks[1].attach_ring(found[1], 0, again.send_ring.handle)
    assert found[1].receive_rings[0].read_whole(3) is not None


# what is remembered


def test_partners_of_a_step_are_remembered_for_a_while(ranks):
    """Sources and targets of the last ``_MAX_HISTORY`` steps are known, older ones are not."""
    channel = joined(ranks)[0]
    channel.record(7, [1], [1, 2])
    assert channel.partners(7) == ({1}, {1, 2})
    assert ranks[0].partners(MatchKey("w", 7)) == ({1}, {1, 2})
    assert ranks[0].partners(MatchKey("w", 8)) is None
    assert ranks[0].partners(MatchKey("v", 7)) is None
    for step in range(8, 8 + module._MAX_HISTORY):
        channel.record(step, [], [])
    assert channel.partners(7) is None
    assert channel.partners(7 + module._MAX_HISTORY) == (set(), set())


def test_channels_are_not_without_end(ranks, monkeypatch):
    """Beyond their number everything goes by message: no channel, and no memory taken."""
    monkeypatch.setattr(module, "_MAX_CHANNELS", 2)
    found = [
        ranks[0].find_or_open(MatchKey(name, 1), ExchangeSignature("verb", "float32", (3,)), [1])
        for name in "abc"
    ]
    assert [channel is None for channel in found] == [False, False, True]


def test_partners_are_found_in_any_signature_of_a_name(ranks):
    """Partners of a step are found in whichever signature's channel it was exchanged."""
    joined(ranks)[0].record(4, [1], [])
    other = joined(ranks, signature=ExchangeSignature("verb", "float64", (3,)))[0]
    other.record(5, [], [1])
    assert ranks[0].partners(MatchKey("w", 4)) == ({1}, set())
    assert ranks[0].partners(MatchKey("w", 5)) == (set(), {1})


# unexpected tensors


def unexpected(channels):
    return [
        (peer, data.key, data.verb, data.dtype, data.shape)
        for peer, data in channels.unexpected_tensors()
    ]


def test_what_is_sent_to_this_rank_is_unexpected_until_it_is_read(ranks):
    """It is listed like a message, so that it is compared with what this rank does instead."""
    found = joined(ranks, pairs=((0, 1), (1, 0), (0, 2)))
    assert unexpected(ranks[1]) == []
    found[0].send_ring.try_send(2, (1,), torch.ones(3))
    assert unexpected(ranks[1]) == [(0, MatchKey("w", 2), "verb", "float32", (3,))]
    assert unexpected(ranks[0]) == []
    assert not ranks[1].is_in_flight(MatchKey("w", 2))
    found[1].in_flight.append(2)
    assert ranks[1].is_in_flight(MatchKey("w", 2))
    found[1].in_flight.clear()
    found[1].receive_rings[0].acknowledge(2, 1)
    assert unexpected(ranks[1]) == []


def test_unexpected_tensors_of_two_steps(ranks):
    """Unexpected tensors of two steps are both listed, each until it is acknowledged."""
    found = joined(ranks)
    found[0].send_ring.try_send(2, (1,), torch.ones(3))
    found[0].send_ring.try_send(3, (1,), torch.ones(3))
    assert [key.step for _, key, *_ in unexpected(ranks[1])] == [2, 3]
    found[1].receive_rings[0].acknowledge(2, 1)
    assert [key.step for _, key, *_ in unexpected(ranks[1])] == [3]


def test_what_is_sent_to_others_is_not_unexpected(ranks):
    """A tensor sent to another rank is no unexpected tensor of this one."""
    found = joined(ranks, pairs=((0, 1), (0, 2)))
    found[0].send_ring.try_send(2, (2,), torch.ones(3))
    assert unexpected(ranks[1]) == []
    assert len(unexpected(ranks[2])) == 1


def test_a_tensor_begun_and_not_published_yet_is_not_unexpected(ranks):
    """A step that has begun without a published chunk is no unexpected tensor."""
    found = joined(ranks)
    found[0].send_ring.begin(2, (1,))
    assert unexpected(ranks[1]) == []


# tensors mapped by handle


def test_a_shared_tensor_is_mapped_by_its_handle(ranks):
    """A tensor mapped by its handle shows later changes; one outside of the arena has none."""
    found = joined(ranks)
    arena = ranks[0]._group.arena
    x = arena.empty((3,), torch.float32).copy_(torch.tensor([4.0, 5.0, 6.0]))
    handle = ranks[0].handle_of(x)
    assert ranks[0].handle_of(torch.ones(3)) is None
    assert ranks[1].map_tensor(0, found[1], handle).tolist() == [4.0, 5.0, 6.0]
    x += 1
    assert ranks[1].map_tensor(0, found[1], handle).tolist() == [5.0, 6.0, 7.0]
