"""Messages to services of a peer: whole, in order, heard while the peer does something else."""

from __future__ import annotations

import pytest
import torch

from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.errors import PeerError, PeerLeftError
from asyncddp.transport.loopback import LoopbackTransport

LARGE = 50_000  # elements, which travel apart from their message


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
            matcher.active_messages.progress()


def heard_by(matcher, name="service"):
    heard = []
    matcher.active_messages.handlers[name] = lambda *said: heard.append(said)
    return heard


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (LARGE,)])
def test_a_tensor_arrives_with_what_is_said(two, shape, dtype):
    """A tensor of any shape and dtype arrives unchanged with its content, and none is busy."""
    heard = heard_by(two[1])
    x = torch.ones(shape, dtype=dtype)
    two[0].active_messages.send(1, "service", ("word", 3, 0.5), x)
    carry(two)
    ((peer, content, tensor),) = heard
    assert (peer, content) == (0, ("word", 3, 0.5))
    assert torch.equal(tensor, x)
    assert tensor.dtype == dtype
    assert not two[0].active_messages.busy
    assert not two[1].active_messages.busy


def test_words_alone_arrive_without_a_tensor(two):
    """A message without a tensor calls the handler with None in its place."""
    heard = heard_by(two[1])
    two[0].active_messages.send(1, "service", (1,))
    carry(two)
    assert heard == [(0, (1,), None)]


def test_a_service_that_fails_is_an_error_of_the_next_verb_and_the_rest_arrives(two):
    """Whoever drives the engine goes on: it is not what called the service."""

    def serve(peer, content, tensor):
        if content == ("bad",):
            raise MemoryError("no room")
        heard.append(content)

    heard = []
    two[1].active_messages.handlers["service"] = serve
    for word in ("good", "bad", "better"):
        two[0].active_messages.send(1, "service", (word,))
    carry(two)
    assert heard == [("good",), ("better",)]
    with pytest.raises(PeerError, match=r"rank 0 sent to service could not be taken: MemoryError"):
        raise two[1].channels.late_error


def test_a_small_tensor_may_be_changed_at_once(two):
    """Changing a small tensor after ``send`` does not change what arrives."""
    heard = heard_by(two[1])
    x = torch.ones(4)
    two[0].active_messages.send(1, "service", (), x)
    x.zero_()
    carry(two)
    assert heard[0][2].tolist() == [1.0] * 4


def test_what_comes_after_a_large_tensor_is_heard_after_it(two):
    """The small one is there first, for its bytes travel inside the message."""
    heard = heard_by(two[1])
    two[0].active_messages.send(1, "service", ("large",), torch.ones(LARGE))
    two[0].active_messages.send(1, "service", ("small",))
    two[0].sends.flush()
    for peer, bundle in two[1].sends._transport.poll():
        two[1].receive(peer, bundle)
    carry(two)
    assert [content for _, content, _ in heard] == [("large",), ("small",)]


def test_a_service_may_answer(two):
    """A handler may send to the peer that called it, with the tensor it received."""
    heard = heard_by(two[0])
    two[1].active_messages.handlers["service"] = lambda peer, content, tensor: two[
        1
    ].active_messages.send(peer, "service", (content[0] + 1,), tensor)
    two[0].active_messages.send(1, "service", (1,), torch.ones(LARGE))
    carry(two)
    ((peer, content, tensor),) = heard
    assert (peer, content, tensor.sum().item()) == (1, (2,), LARGE)


def test_what_nobody_takes_is_dropped(two):
    """A message to a service without a handler is dropped, and its transfer completes."""
    two[0].active_messages.send(1, "nobody", (1,), torch.ones(LARGE))
    carry(two)
    assert not two[0].active_messages.busy
    assert not two[1].active_messages.busy


class Broken:
    """A transfer whose peer has failed."""

    abandoned = False

    def done(self):
        raise PeerLeftError("MPI reports that a process has failed")

    def abandon(self):
        self.abandoned = True


class Endless(Broken):
    """A transfer that does not end."""

    def done(self):
        return False


def test_transfers_of_a_failed_peer_are_forgotten(two, monkeypatch):
    """What follows goes on; whoever waits for that peer is told by the wait itself."""
    heard = heard_by(two[1])
    monkeypatch.setattr(two[1].sends._transport, "irecv", lambda *_: Broken())
    monkeypatch.setattr(two[0].sends._transport, "isend", lambda *_: Broken())
    two[0].active_messages.send(1, "service", ("large",), torch.ones(LARGE))
    two[0].active_messages.send(1, "service", ("small",))
    assert two[0].active_messages.busy
    carry(two)
    assert [content for _, content, _ in heard] == [("small",)]
    assert not two[0].active_messages.busy
    assert not two[1].active_messages.busy


def test_what_is_under_way_at_the_end_is_abandoned(two, monkeypatch):
    """The transport keeps its memory until it is through with it."""
    heard = heard_by(two[1])
    coming, leaving = Endless(), Endless()
    monkeypatch.setattr(two[1].sends._transport, "irecv", lambda *_: coming)
    monkeypatch.setattr(two[0].sends._transport, "isend", lambda *_: leaving)
    two[0].active_messages.send(1, "service", (), torch.ones(LARGE))
    carry(two)
    for matcher in two:
        assert matcher.active_messages.busy
        matcher.active_messages.close()
        assert not matcher.active_messages.busy
    assert coming.abandoned
    assert leaving.abandoned
    assert heard == []
