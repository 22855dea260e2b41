"""Decision on one change of members: single-decree Paxos; every rank accepts, voters propose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import itemgetter

from asyncddp.membership.messages import (
    NO_BALLOT,
    Accept,
    Accepted,
    Ballot,
    MembershipMessage,
    Prepare,
    Promise,
)
from asyncddp.membership.view import View


class Proposal:
    """Paxos proposal of this rank: its ballot, promises received, value, and accepting ranks.

    ``dead`` does not change: every rank that promises or accepts has learned of these deaths first.
    """

    def __init__(self, ballot: Ballot, dead: frozenset[int], deadline: float) -> None:
        self.ballot, self.dead, self.deadline = ballot, dead, deadline
        self.promises: dict[int, Promise] = {}
        self.value: View | None = None
        self.acceptors = {ballot.rank}


class Decision:
    """Paxos instance of one rank, which decides the set of members that follows the present one.

    Args:
        rank: Rank of this process.
        view: Present view.
        counts: Function that returns how often each name has been used on this rank.
        send: Function that sends a message to ranks, of which it leaves out this one.
    """

    def __init__(
        self,
        rank: int,
        view: View,
        counts: Callable[[], Mapping[str, int]],
        send: Callable[[Collection[int], MembershipMessage], None],
    ) -> None:
        self._rank, self._view, self._counts, self._send = rank, view, counts, send
        self.promised = self._accepted_ballot = self._highest = NO_BALLOT
        self._accepted: View | None = None
        self.proposal: Proposal | None = None

    def prepare(self, dead: frozenset[int], deadline: float) -> None:
        """Begin a ballot above all that this rank knows of, to be answered until the deadline."""
        highest = max(self._highest, self.promised)
        self.promised = self._highest = Ballot(highest.round + 1, self._rank)
        self.proposal = Proposal(self.promised, dead, deadline)
        self.proposal.promises[self._rank] = self._promise()
        message = Prepare(self._view.number, self.promised, tuple(sorted(dead)))
        self._send(self._view.members, message)

    def missing(self, accused: Collection[int]) -> set[int]:
        """Return the ranks for whose promises this rank's proposal waits."""
        if self.proposal is None or self.proposal.value is not None:
            return set()
        return set(self._view.members) - set(accused) - self.proposal.promises.keys()

    def proceed(
        self, accused: Collection[int], joining: Collection[int], leaving: Collection[int]
    ) -> View | None:
        """Propose a view once all promises are there; return it once a quorum has accepted it."""
        proposal = self.proposal
        if proposal is None:
            return None
        is_quorum = self._view.is_quorum
        if proposal.value is None:
            if self.missing(accused) or not is_quorum(proposal.promises, proposal.dead):
                return None
            proposal.value = self._choose(proposal, accused, joining, leaving)
            self._accepted_ballot, self._accepted = proposal.ballot, proposal.value
            dead = tuple(sorted(proposal.dead))
            message = Accept(self._view.number, proposal.ballot, dead, proposal.value)
            self._send(self._view.voters, message)
        return proposal.value if is_quorum(proposal.acceptors, proposal.dead) else None

    def _choose(
        self,
        proposal: Proposal,
        accused: Collection[int],
        joining: Collection[int],
        leaving: Collection[int],
    ) -> View:
        """Choose the view to propose: one that a lower ballot may have decided, or a new one.

        A view whose voters are all dead does not bind the living, none of which is in it. A new
        view has as members exactly the ranks that have promised and are not accused.
        """
        promises = proposal.promises
        binding = [
            (promise.accepted_ballot, promise.accepted)
            for promise in promises.values()
            if promise.accepted is not None
            and not proposal.dead.issuperset(promise.accepted.voters)
        ]
        if binding:
            return max(binding, key=itemgetter(0))[1]
        stay = {rank: promises[rank].counts for rank in promises.keys() - set(accused)}
        return self._view.successor(stay, proposal.dead, joining, leaving)

    def receive(self, peer: int, message: Prepare | Promise | Accept | Accepted) -> None:
        """Take a message of a member about this decision."""
        proposal = self.proposal
        self._highest = max(self._highest, message.ballot)
        if isinstance(message, Prepare):
            self._yield_to(message.ballot)
            self._send([peer], self._promise())
        elif isinstance(message, Accept):
            if message.ballot >= self.promised:
                self._yield_to(message.ballot)
                self._accepted_ballot, self._accepted = message.ballot, message.view
                self._send([peer], Accepted(self._view.number, message.ballot))
            else:
                self._send([peer], self._promise())
        elif proposal is not None and message.ballot == proposal.ballot:
            if isinstance(message, Promise):
                proposal.promises[peer] = message
            else:
                proposal.acceptors.add(peer)
        elif proposal is not None and message.ballot > proposal.ballot:
            self.proposal = None

    def _yield_to(self, ballot: Ballot) -> None:
        """Promise a ballot, if it is the highest."""
        if ballot > self.promised:
            self.promised, self.proposal = ballot, None

    def _promise(self) -> Promise:
        return Promise(
            self._view.number,
            self.promised,
            dict(self._counts()),
            self._accepted_ballot,
            self._accepted,
        )
