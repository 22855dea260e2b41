"""Each rule of the agreement alone, on one rank."""

from __future__ import annotations

import pytest

from asyncddp.membership import Agreement, View
from asyncddp.membership.messages import (
    NO_BALLOT,
    Accept,
    Accepted,
    Ballot,
    Commit,
    JoinRequest,
    Prepare,
    Promise,
    Suspicion,
)
from tests.unit.membership.cluster import Cluster

SMALL = View(1, (0, 1), {}, left=(2,), voters=(0, 1))


def sent(agreement: Agreement, kind: type) -> list:
    return [message for _, message in agreement.outgoing() if isinstance(message, kind)]


def proposer(n: int, dead: int) -> Agreement:
    """Rank 0, which has prepared its first ballot after a certified death."""
    agreement = Agreement(0, range(n), dict)
    agreement.suspect(dead, certified=True, reason="", now=0.0)
    return agreement


def test_an_acceptor_refuses_what_is_below_its_promise():
    """Lower ballots are answered by the higher promise."""
    agreement = Agreement(1, range(3), dict)
    agreement.receive(2, Prepare(0, Ballot(2, 2), ()), 0.0)
    agreement.outgoing()
    agreement.receive(0, Accept(0, Ballot(1, 0), (), SMALL), 0.0)
    agreement.receive(0, Prepare(0, Ballot(1, 0), ()), 0.0)
    assert (
        sent(agreement, Accepted | Promise) == [Promise(0, Ballot(2, 2), {}, NO_BALLOT, None)] * 2
    )


def test_a_proposer_proposes_what_the_highest_ballot_has_accepted():
    """A view that may have been decided is adopted."""
    agreement = proposer(4, 3)
    other = View(1, (0, 1, 2), {"a": 9}, left=(3,), voters=(0, 1, 2))
    ballot = agreement._decision.promised
    agreement.receive(1, Promise(0, ballot, {}, Ballot(0, 1), SMALL), 0.0)
    agreement.receive(2, Promise(0, ballot, {}, Ballot(0, 2), other), 0.0)
    assert sent(agreement, Accept)[0].view == other


def test_a_view_whose_voters_are_all_dead_does_not_bind():
    """Nobody alive acts on it."""
    agreement = Agreement(2, range(3), dict)
    agreement.receive(0, Accept(0, Ballot(1, 0), (), SMALL), 0.0)
    for dead in (0, 1):
        agreement.suspect(dead, certified=True, reason="", now=0.0)
    assert agreement.view.members == (2,)
    assert agreement.isolated is None


def test_a_proposer_that_must_propose_its_own_exclusion_is_isolated():
    """It commits the view for the others, and ends."""
    agreement = Agreement(2, range(3), dict)
    agreement.receive(0, Accept(0, Ballot(1, 0), (), SMALL), 0.0)
    agreement.suspect(0, certified=True, reason="", now=0.0)
    for _ in range(8):
        agreement.tick(agreement._turns._last + 0.25)
    ballot = agreement._decision.promised
    assert ballot.rank == 2
    agreement.receive(1, Promise(0, ballot, {}, Ballot(1, 0), SMALL), 2.0)
    agreement.receive(1, Accepted(0, ballot), 2.0)
    assert agreement.isolated == "view 1 was decided without this rank"


def test_a_view_is_decided_by_a_quorum_of_acceptances():
    """Fewer acceptances decide nothing."""
    agreement = proposer(4, 3)
    ballot = agreement._decision.promised
    for peer in (1, 2):
        agreement.receive(peer, Promise(0, ballot, {}, NO_BALLOT, None), 0.0)
    assert agreement.view.number == 0
    agreement.receive(1, Accepted(0, ballot), 0.0)
    assert agreement.view.members == (0, 1, 2)  # half of four, with the lowest
    assert len(sent(agreement, Commit)) == 3


def test_a_death_during_a_ballot_begins_another():
    """The dead of a ballot do not change."""
    agreement = proposer(4, 3)
    first = agreement._decision.promised
    agreement.receive(1, Promise(0, first, {}, NO_BALLOT, None), 0.0)
    agreement.suspect(2, certified=True, reason="", now=0.0)
    assert agreement._decision.promised > first
    assert sent(agreement, Accept) == []


def test_the_dead_are_told_and_not_heard():
    """A certified death is passed on, and messages of the dead are ignored."""
    agreement = Agreement(1, range(4), dict)
    agreement.receive(2, Prepare(0, Ballot(1, 2), (0,)), 0.0)
    assert {rank for rank, one in agreement.outgoing() if isinstance(one, Suspicion)} == {0, 2, 3}
    agreement.receive(0, Commit(SMALL), 0.0)
    assert agreement.view.number == 0


def test_an_isolated_rank_answers_nothing():
    """It acts no more."""
    agreement = Agreement(1, range(3), dict)
    agreement.receive(2, Prepare(0, Ballot(1, 2), (1,)), 0.0)
    assert agreement.isolated is not None
    assert sent(agreement, Promise) == []


def test_silence_to_a_ballot_is_a_suspicion_until_the_rank_answers():
    """A late answer withdraws it."""
    agreement = proposer(4, 3)
    for tenth in range(7):
        agreement.tick(tenth / 10)
    suspicions = sent(agreement, Suspicion)
    assert {one.rank for one in suspicions if not one.certified} == {1, 2}
    agreement.receive(1, Promise(0, Ballot(0, 1), {}, NO_BALLOT, None), 0.7)
    assert {one.rank for one in sent(agreement, Suspicion) if one.withdrawn} == {1}


def test_an_accused_rank_that_promises_is_left_out():
    """A promise does not outweigh a majority's suspicion."""
    agreement = Agreement(0, range(3), dict)
    agreement.receive(1, Suspicion(0, 2, False, "silent"), 0.0)
    agreement.suspect(2, certified=False, reason="silent", now=0.0)
    ballot = agreement._decision.promised
    agreement.receive(2, Promise(0, ballot, {}, NO_BALLOT, None), 0.0)
    agreement.receive(1, Promise(0, ballot, {}, NO_BALLOT, None), 0.0)
    assert sent(agreement, Accept)[0].view.members == (0, 1)


def test_a_view_is_believed_from_voters_alone():
    """A Commit of another rank is not taken."""
    view = View(3, (0, 1, 2), {}, joined=(2,), voters=(0, 1))
    agreement = Agreement(0, range(3), dict, number=3)
    agreement.view = view
    agreement.receive(2, Commit(View(4, (0, 2), {}, voters=(0,))), 0.0)
    assert agreement.view == view


def test_who_has_joined_yields_to_the_view_of_a_voter():
    """A new voter with a rival view takes the established one's."""
    agreement = Agreement(3, (0, 1, 2), dict)
    agreement.receive(0, Commit(View(1, (0, 1, 2, 3), {}, joined=(3,), voters=(0, 1, 2))), 0.0)
    assert agreement.joined
    agreement.receive(2, Commit(View(1, (1, 2), {}, left=(0,), voters=(1, 2))), 0.0)
    assert "without this rank" in agreement.isolated


def test_a_request_to_join_is_taken_from_any_member():
    """Every member passes it to all."""
    agreement = Agreement(0, (0, 1), dict)
    agreement.receive(1, JoinRequest(0, 5), 0.0)
    ballot = agreement._decision.promised
    agreement.receive(1, Promise(0, ballot, {}, NO_BALLOT, None), 0.0)
    assert sent(agreement, Accept)[0].view.joined == (5,)


@pytest.mark.parametrize(
    ("ranks", "dead", "quorum"),
    [
        ({0, 1, 2}, (), True),
        ({1, 2, 3}, (), True),
        ({0, 1}, (), True),
        ({2, 3}, (), False),
        ({2, 3}, (0,), False),
        ({2, 3}, (0, 1), True),
        ({3}, (0, 1, 2), True),
        ((), (0, 1, 2, 3), False),
    ],
)
def test_quorums(ranks, dead, quorum):
    """All voters that are not dead, more than half, or half with the lowest; no fresh ones."""
    assert View.first(range(4)).is_quorum(ranks, dead) == quorum


def test_voters_of_one_view_alone_decide_nothing():
    """Fresh voters need one that voted before."""
    view = View(4, (0, 1, 2), {}, voters=(0, 1, 2), fresh=(0, 1))
    assert not view.is_quorum({0, 1}, ())
    assert view.is_quorum({0, 1}, (2,))
    assert view.is_quorum({1, 2}, ())


def test_new_voters_lose_their_votes_while_a_removed_one_may_not_know():
    """A removal without proof of death takes fresh votes back."""
    view = View(4, (0, 1, 2, 3), {}, voters=(0, 1, 2, 3), fresh=(3,))
    kept = {rank: {} for rank in (0, 1, 3)}
    assert view.successor(kept, {2}, ()).voters == (0, 1, 3)
    weak = view.successor(kept, (), {5})
    assert (weak.voters, weak.unfenced, weak.fresh) == ((0, 1), (2,), ())
    later = weak.successor({rank: {} for rank in weak.members}, (), ())
    assert later.voters == (0, 1)
    assert weak.successor({rank: {} for rank in weak.members}, {2}, ()).voters == (0, 1, 3, 5)


def test_a_member_that_does_not_vote_repeats_its_wish_to_leave():
    """Its request was lost with a connection; the voters hear of it when it is due to propose."""
    cluster = Cluster(2)
    cluster.kill(1)
    cluster.certify(0, 1)
    cluster.join(0, 1)
    cluster.flow()
    assert cluster.processes[1].agreement.view.voters == (0,)
    cluster.cuts.add((1, 0))
    cluster.leave(1, None)
    cluster.settle()
    assert cluster.processes[0].agreement.view.leaving == (1,)
