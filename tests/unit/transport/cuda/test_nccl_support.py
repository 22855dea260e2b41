"""The stand-in for NCCL, and the order of messages: what tests of ``nccl`` rest on."""

from __future__ import annotations

import random
from functools import partial
from itertools import count

import pytest
import torch

from asyncddp.device.stream_interfaces import HostStreams, StreamRole
from asyncddp.transport.cuda.nccl.communicator import BYTE, nccl_group, open_in_thread
from asyncddp.transport.cuda.nccl.coordination_messages import TransferPostedMessage
from asyncddp.transport.cuda.nccl.leader_follower import MatchTable
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl


class Ranks:
    """Ranks that enter messages by hand, each pair of them through one communicator."""

    def __init__(self, size, room=64, streams=None):
        self.nccl = FakeNccl(LateDevice(room=room))
        self.bindings = [self.nccl.library(rank) for rank in range(size)]
        self.streams = streams
        self.comms, self.currents, self.kept = {}, {}, []

    def connect(self, *pairs):
        for one, other in pairs:
            identity = self.bindings[one].nccl.get_unique_id()
            openings = [
                open_in_thread(partial(self._made, rank, identity, place), HostStreams())
                for place, rank in enumerate((one, other))
            ]
            while not all(opening.done() for opening in openings):
                self.nccl.device.step()
            for opening, pair in zip(openings, ((one, other), (other, one)), strict=True):
                self.comms[pair], self.currents[pair] = opening.result()
        for queue in list(self.nccl.device.queues.values()):
            while queue:
                self.nccl.device.step()
        return self

    def _made(self, rank, identity, place):
        bindings = self.bindings[rank]
        current = self.nccl.device.stream(100 + rank) if self.streams else bindings.stream(None)
        comm = bindings.nccl.NcclCommunicator(2, identity, place)
        self._enter(rank, comm, current, 1, 1)
        return comm, current

    def _enter(self, rank, comm, current, sent, taken, held=True):
        given, into = torch.ones(sent).byte(), torch.zeros(taken).byte()
        self.kept.append((given, into))
        device, other = self.nccl.device, 1 - comm.place
        with current():
            if held:
                device.record_stream(given, StreamRole.CALLER)
                device.record_stream(into, StreamRole.CALLER)
            stream = device.stream_pointer(StreamRole.CALLER)
            with nccl_group(self.bindings[rank].nccl):
                comm.send(given.data_ptr(), sent, BYTE, other, stream)
                comm.recv(into.data_ptr(), taken, BYTE, other, stream)
            return device.record_event(StreamRole.CALLER), into

    def enter(self, rank, peer, sent=4, taken=4, held=True):
        return self._enter(
            rank, self.comms[rank, peer], self.currents[rank, peer], sent, taken, held
        )

    def finish(self, events):
        for _ in range(2000):
            if all([event.done() for event, _ in events]):
                return [into.tolist() for _, into in events]
        raise AssertionError("not done")


CIRCLE = [(0, 1), (1, 2), (2, 0)]


def test_messages_arrive_once_both_have_entered():
    """In the stand-in a group ends only once both ranks have launched theirs."""
    ranks = Ranks(2).connect((0, 1))
    event, into = ranks.enter(0, 1)
    for _ in range(100):
        assert not event.done(), "the other side has yet to come"
    assert ranks.finish([(event, into), ranks.enter(1, 0)]) == [[1] * 4] * 2


def test_streams_of_their_own_make_any_order_good():
    """With a stream per pair, three ranks may launch their groups in circular order."""
    ranks = Ranks(3).connect(*CIRCLE)
    orders = [[(0, 1), (0, 2)], [(1, 2), (1, 0)], [(2, 0), (2, 1)]]
    assert len(ranks.finish([ranks.enter(*pair) for order in orders for pair in order])) == 6


def test_ranks_that_wait_in_a_circle_through_one_stream_are_found():
    """The stand-in reports a deadlock of groups on one stream for each rank."""
    ranks = Ranks(3, streams="one for each rank").connect(*CIRCLE)
    orders = [[(0, 1), (0, 2)], [(1, 2), (1, 0)], [(2, 0), (2, 1)]]
    events = [ranks.enter(*pair) for order in orders for pair in order]
    with pytest.raises(AssertionError, match=r"(?s)wait in a circle:.*rank 0's send, recv .*waits"):
        ranks.finish(events)


def test_ranks_that_wait_in_a_circle_for_room_are_found():
    """The stand-in reports a deadlock of groups for want of room on the devices."""
    ranks = Ranks(3, room=1).connect(*CIRCLE)
    for rank in range(3):
        ranks.enter(rank, (rank + 1) % 3)
    for _ in range(30):
        ranks.nccl.device.step()
    events = [ranks.enter(rank, (rank - 1) % 3) for rank in range(3)]
    with pytest.raises(AssertionError, match="ranks wait in a circle"):
        ranks.finish(events)


def test_sizes_that_do_not_fit_are_found():
    """The stand-in reports a send and a receive of unequal size."""
    ranks = Ranks(2).connect((0, 1))
    events = [ranks.enter(0, 1, sent=4), ranks.enter(1, 0, taken=3)]
    with pytest.raises(AssertionError, match="sends and receives do not fit"):
        ranks.finish(events)


def test_memory_of_which_the_stream_was_not_told_is_found():
    """The stand-in reports memory given to a call without ``record_stream``."""
    ranks = Ranks(2).connect((0, 1))
    with pytest.raises(AssertionError, match="memory that its stream does not hold"):
        ranks.enter(0, 1, held=False)


def test_a_first_exchange_that_holds_up_a_thread_with_other_things_to_do_is_found():
    """The stand-in reports a connecting exchange that blocks a thread not made for it."""
    ranks = Ranks(2).connect((0, 1))
    ranks.comms[0, 1].group.connected.clear()
    with pytest.raises(AssertionError, match="connecting messages holds up the thread MainThread"):
        ranks.enter(0, 1)


def test_what_torch_does_on_a_late_stream_is_late():
    """Operations on a late stream take effect only once its event is asked for often enough."""
    device, x = LateDevice(), torch.ones(2)
    with device.stream(1)():
        x.mul_(3)
        event = device.record_event(StreamRole.CALLER)
    assert x.tolist() == [1.0, 1.0]
    while not event.done():
        pass
    assert x.tolist() == [3.0, 3.0]


# the order of messages


@pytest.mark.parametrize("seed", range(20))
def test_offers_of_one_line_meet_in_order_whatever_came_between(seed):
    """Requests of one direction and tag match in order; a cancelled one never does."""
    draw, book, numbers = random.Random(seed), MatchTable(), (count(), count())
    begun = {(side, sends, tag): [] for side in (0, 1) for sends in (0, 1) for tag in range(3)}
    met, gone = [], set()
    for _ in range(200):
        side, sends, tag = draw.choice(list(begun))
        offer = TransferPostedMessage(next(numbers[side]), bool(sends), tag, 8)
        begun[side, sends, tag].append(offer)
        book.add(offer, local=not side)
        if draw.random() < 0.2:
            side_of, *way = draw.choice(list(begun))
            line, matched = begun[(side_of, *way)], {m[side_of].number for m in met}
            place = draw.choice(line) if line else None
            if place is not None:
                book.cancel(place, local=side_of == 0)
                if place.number not in matched:
                    line.remove(place)
                    gone.add((side_of, place.number))
        if draw.random() < 0.3:
            met += book.take()
            assert not book.matching_keys()
            assert not book.is_one_way()
    met += book.take()
    for sends in (0, 1):
        for tag in range(3):
            mine, theirs = begun[0, sends, tag], begun[1, 1 - sends, tag]
            found = [m for m in met if (m[0].sends, m[0].tag) == (bool(sends), tag)]
            assert found == list(zip(mine, theirs, strict=False))
    assert not gone & {(0, m[0].number) for m in met}


def test_nobody_waits_for_the_other_way_where_nothing_is_expected():
    """Matches are one way only where the leader has a request the other way left."""
    book = MatchTable()
    book.add(TransferPostedMessage(0, True, 1, 8), local=True)
    book.add(TransferPostedMessage(0, False, 1, 8), local=False)
    assert book.matching_keys()
    assert not book.is_one_way()
    book.add(TransferPostedMessage(1, True, 2, 8), local=True)
    assert not book.is_one_way(), "it waits for more of the same way"
    book.add(TransferPostedMessage(2, False, 2, 8), local=True)
    assert book.is_one_way()
