"""What comes is matched with what is expected, by name; no engine, no threads."""

from __future__ import annotations

import pytest
import torch

from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.errors import (
    DeadlockError,
    MismatchError,
    PeerError,
    PeerLeftError,
    WaitTimeoutError,
)
from asyncddp.transport.loopback import LoopbackTransport

KEY = MatchKey("x", 0)
PAIR = ExchangeSignature("verb", "float32", (2,))


@pytest.fixture
def two():
    """Two mailboxes, joined by a transport."""
    return [MessageMatcher(end) for end in LoopbackTransport.group(2)]


def carry(mailboxes):
    """Let all messages arrive."""
    for _ in range(4):
        for matcher in mailboxes:
            matcher.sends.flush()
        for matcher in mailboxes:
            for peer, bundle in matcher.sends._transport.poll():
                assert matcher.receive(peer, bundle) == []


def opened(matcher, key=KEY, form=PAIR, sources=(), targets=(), check=False):
    exchange = ExchangeRequest(key, form, sources, targets)
    matcher.open(exchange, check=check)
    return exchange


def test_a_tensor_arrives_before_or_after_it_is_expected(two):
    """A tensor arrives unchanged whether the receive was posted before or after it."""
    for key, receiver_first in ((MatchKey("x", 0), True), (MatchKey("x", 1), False)):
        x = torch.tensor([1.0, 2.0])
        if receiver_first:
            there = opened(two[1], key, sources=[0])
        here = opened(two[0], key, targets=[1])
        two[0].sends.send(here, 1, x)
        carry(two)
        if not receiver_first:
            there = opened(two[1], key, sources=[0])
            carry(two)
        assert there.receives[0].done()
        assert torch.equal(there.receives[0].take(), x)
        assert here.sent().done()


def test_a_large_tensor_comes_in_bulk_and_without_a_copy_of_its_own(two, monkeypatch):
    """A tensor too large for a message is sent from its memory into the one that is taken."""
    x = torch.arange(50_000, dtype=torch.float32)
    places, sizes = [], []

    def noted(transport, verb, note):
        call = getattr(transport, verb)
        monkeypatch.setattr(transport, verb, lambda *given: [note(*given), call(*given)][1])

    noted(two[0].sends._transport, "isend", lambda tensor, *_: places.append(tensor.data_ptr()))
    noted(two[1].sends._transport, "irecv", lambda tensor, *_: places.append(tensor.data_ptr()))
    noted(two[0].sends._transport, "post", lambda _, message: sizes.append(len(message)))
    form = ExchangeSignature("verb", "float32", (50_000,))
    here = opened(two[0], form=form, targets=[1])
    two[0].sends.send(here, 1, x)
    there = opened(two[1], form=form, sources=[0])
    carry(two)
    assert there.receives[0].done()
    taken = there.receives[0].take()
    assert torch.equal(taken, x)
    assert here.sent().done()
    assert places == [x.data_ptr(), taken.data_ptr()]
    assert 0 < sum(sizes) < 1000


def test_bytes_that_nobody_wants_fail_on_nobody(two, monkeypatch):
    """What is dropped here is dropped, too, where its transport breaks meanwhile."""

    class Broken:
        def done(self):
            raise PeerError("the connection is broken")

    form = ExchangeSignature("verb", "float32", (50_000,))
    here = opened(two[0], MatchKey("y", 0), form, targets=[1])
    two[1].close(opened(two[1], MatchKey("y", 0), PAIR, sources=[0]), PeerError("given up"))
    monkeypatch.setattr(two[1].sends._transport, "irecv", lambda *_: Broken())
    two[0].sends.send(here, 1, torch.ones(50_000))
    carry(two)
    assert two[1]._announced._discards == [], "the bytes are let go"
    there = opened(two[1], MatchKey("z", 0), sources=[0])
    two[0].sends.send(opened(two[0], MatchKey("z", 0), targets=[1]), 1, torch.ones(2))
    carry(two)
    assert there.receives[0].done()


def test_a_tensor_before_its_time_waits(two):
    """A tensor that nobody expects yet is kept, and its send stays open at first use."""
    here = opened(two[0], targets=[1])
    two[0].sends.send(here, 1, torch.ones(2))
    carry(two)
    assert not here.sent().done(), "the first use of a form is confirmed"
    assert here.sent().missing() == [(1, KEY)]
    assert [data.verb for data in two[1].unexpected_from(0)] == ["verb"]
    assert not two[1].has_submitted(KEY)


@pytest.mark.parametrize("name", ["x", "x/1", "<collective>", "<collective>/2"])
def test_an_operation_that_was_submitted_will_send_its_later_parts(name):
    """Who is blocked in another verb meanwhile is not waited for in vain, on slow links either."""
    matcher = MessageMatcher(LoopbackTransport.group(2)[0], {name.partition("/")[0]: 3})
    assert [matcher.has_submitted(MatchKey(name, step)) for step in (2, 3)] == [True, False]
    assert not matcher.has_submitted(MatchKey("y/x/1", 2))


def test_a_peer_whose_tensor_is_here_already_is_not_asked_whether_it_comes(two, monkeypatch):
    """It has said so with that tensor, and would never answer."""
    monkeypatch.setattr("asyncddp.engine.send_queue._BYTES_AHEAD", 10)
    x = torch.ones(2)
    for step in range(4):
        key = MatchKey("x", step)
        early = opened(two[0], key, sources=[1], targets=[1])
        two[0].sends.send(early, 1, x)
        carry(two)
        late = opened(two[1], key, sources=[0], targets=[0])
        two[1].sends.send(late, 0, x)
        carry(two)
        assert late.sent().done(), step
        assert early.sent().done(), step
        for matcher, exchange in zip(two, (early, late), strict=True):
            matcher.close(exchange, None)


def test_so_many_bytes_may_run_ahead_of_a_receiver(two, monkeypatch):
    """A sender awaits an acknowledgement when more bytes than the limit went without one."""
    monkeypatch.setattr("asyncddp.engine.send_queue._BYTES_AHEAD", 1000)
    form, asked = ExchangeSignature("verb", "float32", (100,)), []
    for step in range(1, 10):
        here = opened(two[0], MatchKey("x", step), form, targets=[1])
        here.unacknowledged.clear()
        two[0].sends.send(here, 1, torch.ones(100))
        asked.append(bool(here.unacknowledged))
        carry(two)
        opened(two[1], MatchKey("x", step), form, sources=[0])
        carry(two)
        assert here.sent().done(), "the receiver has confirmed it"
    assert asked == [False, False, True] * 3


def test_a_form_is_confirmed_once_under_whatever_name(two):
    """The first exchange of a signature with a peer awaits its word, and each 64th of a name."""
    other = ExchangeSignature("verb", "float64", (2,))
    for key, form, confirmed in (
        (MatchKey("x", 1), PAIR, True),
        (MatchKey("x", 2), PAIR, False),
        (MatchKey("y", 1), PAIR, False),
        (MatchKey("y", 2), other, True),
        (MatchKey("x", 3), other, False),
        (MatchKey("x", 64), PAIR, True),
        (MatchKey("z", 0), PAIR, True),
    ):
        here = opened(two[0], key, form, targets=[1])
        assert here.unacknowledged == ({1} if confirmed else set()), key
        two[0].sends.send(here, 1, torch.ones(2, dtype=getattr(torch, form.dtype)))
        there = opened(two[1], key, form, sources=[0])
        carry(two)
        assert there.receives[0].done()
        assert here.sent().done()
        two[0].close(here, None)
        two[1].close(there, None)


def test_now_and_then_a_sender_waits_so_that_it_does_not_run_ahead(two):
    """In every 64th use of a name the sender awaits an acknowledgement."""
    here = opened(two[0], targets=[1])
    two[0].sends.send(here, 1, torch.ones(2))
    opened(two[1], sources=[0])
    carry(two)
    two[0].close(here, None)
    asked = [
        step
        for step in range(1, 200)
        if opened(two[0], MatchKey("x", step), targets=[1]).unacknowledged
    ]
    assert asked == [64, 128, 192]


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (ExchangeSignature("other", "float32", (2,)), "expected verb other, got verb"),
        (ExchangeSignature("verb", "float64", (2,)), "expected dtype float64, got float32"),
        (ExchangeSignature("verb", "float32", (3,)), "expected shape (3,), got (2,)"),
        (ExchangeSignature("verb", "float32", (2, 1)), "expected shape (2, 1), got (2,)"),
        (ExchangeSignature("verb", "float32", ()), "expected shape (), got (2,)"),
        (ExchangeSignature("verb", "float32", (None, 4)), "expected shape (any, 4), got (2,)"),
    ],
)
def test_both_sides_fail_where_forms_differ(two, form, told):
    """Where verb, dtype or shape differ, both ranks raise ``MismatchError`` with both values."""
    here = opened(two[0], targets=[1])
    two[0].sends.send(here, 1, torch.ones(2))
    there = opened(two[1], form=form, sources=[0])
    carry(two)
    with pytest.raises(MismatchError) as caught:
        there.receives[0].done()
    assert str(caught.value) == f"rank 1, {form.verb} 'x' (use 0), peer rank 0: {told}"
    with pytest.raises(MismatchError) as caught:
        here.sent().done()
    assert str(caught.value) == (
        f"rank 0, verb 'x' (use 0), refused by rank 1: rank 1 {told} from rank 0"
    )


def test_any_size_fits_where_any_will_do(two):
    """A dimension of None in the signature takes any size."""
    there = opened(two[1], form=ExchangeSignature("verb", "float32", (None, 2)), sources=[0])
    here = opened(two[0], form=ExchangeSignature("verb", "float32", (None, 2)), targets=[1])
    two[0].sends.send(here, 1, torch.ones(7, 2))
    carry(two)
    assert there.receives[0].take().shape == (7, 2)


def test_one_key_is_open_once(two):
    """Opening a key that is under way raises ``MismatchError``."""
    opened(two[0])
    with pytest.raises(MismatchError) as caught:
        opened(two[0])
    assert str(caught.value) == "rank 0: 'x' (use 0) is under way already; wait for it first"


def test_a_failure_is_told_to_all_who_take_part(two):
    """An error that closes an exchange raises at its peer, with the rank of origin."""
    here = opened(two[0], sources=[1])
    there = opened(two[1], targets=[0])
    two[0].close(here, MismatchError("rank 0 has found something"))
    carry(two)
    with pytest.raises(MismatchError, match="refused by rank 0: rank 0 has found") as caught:
        there.sent().done()
    assert caught.value.origin == 0


@pytest.mark.parametrize(
    "kind", [DeadlockError, MismatchError, PeerError, PeerLeftError, WaitTimeoutError]
)
def test_a_failure_keeps_its_kind_and_where_it_began(two, kind):
    """Also where it was told before the rank that hears it has come."""
    error = kind("rank 7 and what it met")
    error.origin = 7
    two[0].close(opened(two[0], sources=[1]), error)
    carry(two)
    there = opened(two[1], targets=[0])
    with pytest.raises(PeerError, match="by rank 0: rank 7 and what it met") as caught:
        there.sent().done()
    assert type(caught.value) is kind
    assert caught.value.origin == 7


def test_a_failure_is_kept_for_those_who_come_later(two):
    """A peer that opens the exchange after it has failed elsewhere gets the error."""
    here = opened(two[0], sources=[1])
    two[0].close(here, PeerError("rank 0 gave up"))
    carry(two)
    there = opened(two[1], targets=[0])
    with pytest.raises(PeerError, match="given up by rank 0: rank 0 gave up"):
        there.sent().done()


def test_what_comes_for_an_exchange_that_has_ended_is_remembered_as_late(two):
    """A tensor for a closed exchange is refused at its sender, and a late error here."""
    there = opened(two[1])
    two[1].close(there, None)
    here = opened(two[0], targets=[1])
    two[0].sends.send(here, 1, torch.ones(2))
    carry(two)
    assert "expected nothing from rank 0 in verb 'x' (use 0)" in str(two[1].channels.late_error)
    with pytest.raises(MismatchError, match="refused by rank 1"):
        here.sent().done()


def test_bulk_that_nobody_wants_is_taken_off_the_transport(two):
    """So that its sender's buffer becomes free."""
    x = torch.ones(50_000)
    form = ExchangeSignature("verb", "float32", (50_000,))
    here = opened(two[0], form=form, targets=[1])
    two[0].sends.send(here, 1, x)
    opened(two[1], form=PAIR, sources=[0])
    carry(two)
    assert all(transfer.done() for _, transfer in here.sends)


def test_a_peer_that_is_left_out_is_told_and_only_that_one(two):
    """Refusing a waiting peer raises there if nothing is sent to it, else it has no effect."""
    opened(two[0])
    there = opened(two[1], sources=[0])
    two[0].refuse_waiting_peer(1, KEY)
    two[0].refuse_waiting_peer(1, MatchKey("unknown", 0))
    carry(two)
    with pytest.raises(MismatchError, match="refused by rank 0: rank 0 sends nothing to rank 1"):
        there.receives[0].done()
    later = MatchKey("x", 1)
    opened(two[0], later, targets=[1])
    waiting = opened(two[1], later, sources=[0])
    two[0].refuse_waiting_peer(1, later)
    carry(two)
    assert not waiting.receives[0].done()
