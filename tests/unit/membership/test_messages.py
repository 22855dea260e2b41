"""Messages that make no sense change nothing; evidence, counts and joins do what they say."""

from __future__ import annotations

import copy

import msgspec
import pytest

from asyncddp.membership import Agreement, MembershipMessage, View
from asyncddp.membership.messages import (
    NO_BALLOT,
    Accept,
    Accepted,
    Ballot,
    Commit,
    JoinRequest,
    LeaveRequest,
    Prepare,
    Promise,
    Suspicion,
    ViewRequest,
)
from tests.unit.membership.cluster import PATIENCE, Cluster

BALLOT = Ballot(5, 2)
VIEW = View(1, (0, 1), {"a": 3}, left=(2,), voters=(0, 1))


def messages(number: int) -> list[MembershipMessage]:
    view = msgspec.structs.replace(VIEW, number=number + 1)
    return [
        Suspicion(number, 1, True, "it fell"),
        Suspicion(number, 1, False, "it is silent"),
        Prepare(number, BALLOT, (1,)),
        Promise(number, BALLOT, {"a": 3}, Ballot(4, 1), view),
        Accept(number, BALLOT, (1,), view),
        Accepted(number, BALLOT),
        ViewRequest(number),
        JoinRequest(number, 7),
        LeaveRequest(number, 7),
    ]


def state(agreement: Agreement) -> tuple:
    evidence = agreement._evidence
    return copy.deepcopy((
        agreement.view, agreement.isolated, agreement.frozen, agreement._joining,
        evidence.dead, evidence.own, evidence._reports, agreement._decision.promised,
        agreement._decision._accepted,
    ))  # fmt: skip


@pytest.mark.parametrize("peer", [-1, 3, 99])
@pytest.mark.parametrize("number", [-1, 0, 1])
def test_an_unknown_rank_changes_nothing(peer, number):
    """Messages of a rank that is no member are neither believed nor answered."""
    agreement = Agreement(0, range(3), dict)
    before = state(agreement)
    for message in [*messages(number), Commit(VIEW)]:
        agreement.receive(peer, message, 0.0)
    assert state(agreement) == before
    assert agreement.outgoing() == []


@pytest.mark.parametrize("number", [-1, 0, 7])
def test_a_message_of_another_view_is_only_answered(number):
    """An older one by the Commit, a newer one by a request for its view."""
    agreement = Agreement(0, range(3), dict, number=3)
    before = state(agreement)
    for message in messages(number):
        agreement.receive(2, message, 0.0)
        answer = ViewRequest(3) if number > 3 else Commit(agreement.view)
        assert agreement.outgoing() == [(2, answer)]
    assert state(agreement) == before


def test_a_ballot_of_another_rank_is_ignored():
    """Nobody proposes in another rank's name."""
    agreement = Agreement(0, range(3), dict)
    before = state(agreement)
    for message in (Prepare(0, BALLOT, (2,)), Accept(0, BALLOT, (2,), VIEW)):
        agreement.receive(1, message, 0.0)
    assert state(agreement) == before


def test_messages_survive_the_wire():
    """Each kind is equal after encoding and decoding."""
    for message in [*messages(4), Commit(VIEW), Promise(0, BALLOT, {}, NO_BALLOT, None)]:
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=MembershipMessage) == message


def test_one_weak_suspicion_removes_nobody():
    """It takes more than half of the others."""
    cluster = Cluster(4)
    cluster.suspect(0, 2)
    for _ in range(20):
        cluster.flow()
        cluster.now += PATIENCE / 2
        for rank in range(4):
            cluster.tick(rank)
    assert not cluster.decided
    cluster.suspect(1, 2)  # two of three others
    cluster.settle(4)
    assert cluster.processes[0].agreement.view.members == (0, 1, 3)
    assert "decided without this rank" in cluster.processes[2].agreement.isolated


def test_of_two_ranks_the_lowest_goes_on():
    """Two that suspect each other: half with the lowest rank is a quorum, the other half none."""
    cluster = Cluster(2)
    cluster.cuts = {(0, 1), (1, 0)}
    cluster.suspect(0, 1)
    cluster.suspect(1, 0)
    for _ in range(12):
        cluster.now += PATIENCE / 2
        for rank in cluster.active:
            cluster.tick(rank)
    assert cluster.active == [0]
    assert cluster.processes[0].agreement.view.members == (0,)
    assert "too few ranks" in cluster.processes[1].agreement.isolated


def test_a_rank_returns_and_another_comes():
    """A dead rank's number may be taken again, and new numbers join."""
    cluster = Cluster(3)
    cluster.use(1, "a")
    cluster.kill(2)
    cluster.join(1, 2)
    cluster.join(0, 3)
    cluster.settle(4)
    view = cluster.processes[3].agreement.view
    assert view.members == (0, 1, 2, 3)
    assert cluster.processes[2].uses.counts == {"a": 1}
    assert not cluster.processes[2].agreement.frozen


def test_who_joins_votes_from_the_next_view_on():
    """A joined rank is a member at once, and a voter in a later view."""
    cluster = Cluster(1)
    cluster.join(0, 1)
    cluster.settle(2)
    assert cluster.processes[1].agreement.view.voters == (0,)
    cluster.join(0, 2)
    cluster.settle(2)
    assert cluster.processes[1].agreement.view.voters == (0, 1)
    cluster.kill(0)
    cluster.settle(4)
    assert cluster.processes[1].agreement.view.members == (1, 2)


def test_a_frozen_rank_thaws_only_in_the_next_view():
    """A promise holds until a view is committed."""
    agreement = Agreement(1, range(3), lambda: {"a": 4})
    agreement.receive(0, Prepare(0, Ballot(1, 0), (2,)), 0.0)
    assert agreement.frozen
    assert agreement.view.number == 0
    promise = dict(agreement.outgoing())[0]
    assert isinstance(promise, Promise)
    assert promise.counts == {"a": 4}
    agreement.receive(0, Commit(VIEW), 0.0)
    assert not agreement.frozen
    assert agreement.view == VIEW
