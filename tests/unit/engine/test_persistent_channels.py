"""Channels: which names and forms go through lanes, and what a rank remembers of them."""

from __future__ import annotations

import os

import pytest
import torch

from asyncddp.engine import persistent_channels as module
from asyncddp.engine.messages import COLLECTIVE, ExchangeSignature, MatchKey
from asyncddp.engine.persistent_channels import ChannelTable
from asyncddp.shm.arena import Arena
from asyncddp.transport.base import SharedMemoryGroup

FORM = ExchangeSignature("verb", "float32", (3,))


@pytest.fixture
def ranks():
    """Ranks 0, 1 and 2, which see each other's memory; rank 3 lives elsewhere."""
    arenas = [Arena() for _ in range(3)]
    processes = dict.fromkeys(range(3), os.getpid())
    yield [ChannelTable(SharedMemoryGroup(arena, processes), r) for r, arena in enumerate(arenas)]
    for arena in arenas:
        arena.close()


def joined(ranks, name="w", form=FORM, pairs=((0, 1), (1, 0))):
    """Channels under a name, as they are after lanes were offered and watched for."""
    targets = {rank: [] for pair in pairs for rank in pair}
    for sender, reader in pairs:
        targets[sender].append(reader)
    found = {
        rank: ranks[rank].find_or_open(MatchKey(name, 1), form, to) for rank, to in targets.items()
    }
    for sender, reader in pairs:
        place = ranks[sender].ring_to_offer(found[sender], reader)
        ranks[reader].attach_ring(found[reader], sender, place)
        found[sender].readers.add(reader)
    return found


def test_a_name_has_a_channel_from_its_second_use_on(ranks):
    """The first use of a name opens no channel; later uses share the one of the second."""
    assert ranks[0].find_or_open(MatchKey("w", 0), FORM, [1]) is None
    channel = ranks[0].find_or_open(MatchKey("w", 1), FORM, [1])
    assert channel is not None
    assert channel.send_ring is not None
    assert ranks[0].find_or_open(MatchKey("w", 2), FORM, [1]) is channel
    assert ranks[0].get("w", FORM) is channel
    assert ranks[0].get("v", FORM) is None


def test_each_form_of_a_name_has_a_channel_of_its_own(ranks):
    """Two signatures under one name have two channels with rings of their own."""
    one = ranks[0].find_or_open(MatchKey("w", 1), FORM, [1])
    other = ranks[0].find_or_open(MatchKey("w", 2), ExchangeSignature("verb", "float32", (4,)), [1])
    assert one is not other
    assert one.send_ring.handle != other.send_ring.handle
    assert ranks[0].find_all("w") == [one, other]


@pytest.mark.parametrize(
    ("key", "form"),
    [
        (MatchKey(COLLECTIVE, 5), FORM),
        (MatchKey("w", 5), ExchangeSignature("verb", "float32", (None, 3))),
    ],
    ids=["a collective", "rows that differ"],
)
def test_some_exchanges_never_go_through_lanes(ranks, key, form):
    """Collectives and tensors with a dimension of any size have no channel."""
    assert ranks[0].find_or_open(key, form, [1]) is None


def test_who_only_receives_has_no_lane(ranks):
    """Until it sends to a rank of its machine; a rank elsewhere needs none."""
    assert ranks[0].find_or_open(MatchKey("w", 1), FORM, []).send_ring is None
    assert ranks[0].find_or_open(MatchKey("w", 2), FORM, [3]).send_ring is None
    assert ranks[0].find_or_open(MatchKey("w", 3), FORM, [2, 3]).send_ring is not None


def test_a_tensor_without_elements_has_no_lane(ranks):
    """The channel of a tensor without elements has no ring."""
    assert (
        ranks[0]
        .find_or_open(MatchKey("w", 1), ExchangeSignature("verb", "float32", (2, 0)), [1])
        .send_ring
        is None
    )


def test_without_shared_memory_there_are_no_channels():
    """Without shared memory there are no channels, no handles and no unexpected tensors."""
    alone = ChannelTable(None, 0)
    assert alone.find_or_open(MatchKey("w", 9), FORM, [1]) is None
    assert alone.handle_of(torch.ones(3)) is None
    assert alone.unexpected_tensors() == []


def test_a_machine_of_more_ranks_than_masks_hold_goes_by_message():
    """With 256 ranks on a machine there are rings, with 257 there are none."""
    arena = Arena()
    for count, found in ((256, True), (257, False)):
        near = SharedMemoryGroup(arena, dict.fromkeys(range(count), os.getpid()))
        channel = ChannelTable(near, 0).find_or_open(MatchKey("w", 1), FORM, [1])
        assert (channel is not None and channel.send_ring is not None) == found
    arena.close()


@pytest.mark.parametrize(("limit", "value"), [("_MAX_RINGS", 2), ("_MAX_RING_BYTES", 1500)])
def test_there_is_an_end_to_lanes(ranks, monkeypatch, limit, value):
    """What comes after it has a channel, and no lane."""
    monkeypatch.setattr(module, limit, value)
    lanes = [ranks[0].find_or_open(MatchKey(f"w{k}", 1), FORM, [1]).send_ring for k in range(8)]
    known = [send_ring is not None for send_ring in lanes]
    assert known[0]
    assert not known[-1]
    assert known == sorted(known, reverse=True)


def test_a_system_without_memory_means_no_lane(ranks, monkeypatch):
    """If memory is refused, the channel has no ring, and a later use gets one."""

    def refuses(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuses)
    assert ranks[0].find_or_open(MatchKey("w", 1), FORM, [1]).send_ring is None
    monkeypatch.undo()
    assert ranks[0].find_or_open(MatchKey("w", 2), FORM, [1]).send_ring is not None


def test_a_lane_is_offered_until_a_neighbour_knows_it(ranks):
    """A ring is offered to each peer of the machine until that one reads it."""
    channel = ranks[0].find_or_open(MatchKey("w", 1), FORM, [1])
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
    listener = ranks[2].find_or_open(MatchKey("w", 1), FORM, [])
    assert listener.serves([], [])
    assert not listener.serves([], [0])


def test_what_one_shows_the_other_sees(ranks):
    """What a rank sends through its ring is read whole at its peer, not the other way."""
    found = joined(ranks)
    found[0].send_ring.try_send(2, (1,), torch.tensor([1.0, 2.0, 3.0]))
    assert found[1].receive_rings[0].read_whole(2).tolist() == [1.0, 2.0, 3.0]
    assert found[0].receive_rings[1].read_whole(2) is None


def test_a_retired_lane_is_offered_anew_with_other_memory(ranks):
    """A neighbour that still looks at the old one sees nothing new there."""
    found = joined(ranks)
    old = found[0].send_ring.handle
    ranks[0].retire_ring(found[0])
    assert not found[0].serves([], [1])
    again = ranks[0].find_or_open(MatchKey("w", 3), FORM, [1])
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


def test_partners_are_found_in_any_form_of_a_name(ranks):
    """Partners of a step are found in whichever signature's channel it was exchanged."""
    joined(ranks)[0].record(4, [1], [])
    other = joined(ranks, form=ExchangeSignature("verb", "float64", (3,)))[0]
    other.record(5, [], [1])
    assert ranks[0].partners(MatchKey("w", 4)) == ({1}, set())
    assert ranks[0].partners(MatchKey("w", 5)) == (set(), {1})


# strays


def strays(channels):
    return [
        (peer, data.key, data.verb, data.dtype, data.shape)
        for peer, data in channels.unexpected_tensors()
    ]


def test_what_is_shown_to_this_rank_is_told_until_it_is_taken(ranks):
    """As a message would be, so that it is held against what this rank does instead."""
    found = joined(ranks, pairs=((0, 1), (1, 0), (0, 2)))
    assert strays(ranks[1]) == []
    found[0].send_ring.try_send(2, (1,), torch.ones(3))
    assert strays(ranks[1]) == [(0, MatchKey("w", 2), "verb", "float32", (3,))]
    assert strays(ranks[0]) == []
    assert not ranks[1].is_in_flight(MatchKey("w", 2))
    found[1].in_flight.append(2)
    assert ranks[1].is_in_flight(MatchKey("w", 2))
    found[1].in_flight.clear()
    found[1].receive_rings[0].acknowledge(2, 1)
    assert strays(ranks[1]) == []


def test_strays_of_two_steps(ranks):
    """Unexpected tensors of two steps are both listed, each until it is acknowledged."""
    found = joined(ranks)
    found[0].send_ring.try_send(2, (1,), torch.ones(3))
    found[0].send_ring.try_send(3, (1,), torch.ones(3))
    assert [key.step for _, key, *_ in strays(ranks[1])] == [2, 3]
    found[1].receive_rings[0].acknowledge(2, 1)
    assert [key.step for _, key, *_ in strays(ranks[1])] == [3]


def test_what_is_shown_to_others_is_no_stray(ranks):
    """A tensor sent to another rank is no unexpected tensor of this one."""
    found = joined(ranks, pairs=((0, 1), (0, 2)))
    found[0].send_ring.try_send(2, (2,), torch.ones(3))
    assert strays(ranks[1]) == []
    assert len(strays(ranks[2])) == 1


def test_a_tensor_begun_and_not_shown_yet_is_no_stray(ranks):
    """A step that has begun without a published chunk is no unexpected tensor."""
    found = joined(ranks)
    found[0].send_ring.begin(2, (1,))
    assert strays(ranks[1]) == []


# tensors where they lie


def test_a_shared_tensor_is_looked_at_where_it_lies(ranks):
    """A tensor mapped by its handle shows later changes; one outside of the arena has none."""
    found = joined(ranks)
    arena = ranks[0]._group.arena
    x = arena.empty((3,), torch.float32).copy_(torch.tensor([4.0, 5.0, 6.0]))
    place = ranks[0].handle_of(x)
    assert ranks[0].handle_of(torch.ones(3)) is None
    assert ranks[1].map_tensor(0, found[1], place).tolist() == [4.0, 5.0, 6.0]
    x += 1
    assert ranks[1].map_tensor(0, found[1], place).tolist() == [5.0, 6.0, 7.0]
