"""Agreement of ranks on the members of an elastic run: single-decree Paxos for each change."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from asyncddp.membership.decision import Decision
from asyncddp.membership.evidence import Evidence
from asyncddp.membership.messages import (
    NO_BALLOT,
    Accept,
    Accepted,
    Commit,
    JoinRequest,
    LeaveRequest,
    MembershipMessage,
    Prepare,
    Promise,
    Suspicion,
    ViewRequest,
)
from asyncddp.membership.proposer_turns import ProposerTurns
from asyncddp.membership.view import View

_CUT_OFF = 4  # patiences without a quorum of ranks that are not suspected


class Agreement:
    """State machine by which one rank agrees with the others on the members of an elastic run.

    The caller feeds it evidence, messages and times, and sends what :meth:`outgoing` returns, in
    order. A rank that is not one of ``members`` waits to be joined by a view after ``number``.

    Args:
        rank: Rank of this process.
        members: Ranks of the view with which this rank begins.
        counts: Function that returns how often each name has been used; constant while frozen.
        patience: Seconds in which living ranks answer; :meth:`tick` is due twice in that time.
        number: Number of the view with which this rank begins.
    """

    def __init__(
        self,
        rank: int,
        members: Iterable[int],
        counts: Callable[[], Mapping[str, int]],
        *,
        patience: float = 0.5,
        number: int = 0,
    ) -> None:
        self.rank, self._counts = rank, counts
        self.view = View.first(set(members), number)
        self.isolated: str | None = None
        self._evidence = Evidence(rank, self.view)
        self._known = {rank, *self.view.members}  # all ranks that were members
        self._joining: set[int] = set()
        self._leaving: set[int] = set()
        self._outbox: list[tuple[int, MembershipMessage]] = []
        self._turns = ProposerTurns(patience)
        self._cut_off_since: float | None = None
        self._decision = Decision(rank, self.view, counts, self._tell)

    @property
    def frozen(self) -> bool:
        """True between a promise and the commit: this rank must not begin a round."""
        return self._decision.promised != NO_BALLOT

    @property
    def accused(self) -> frozenset[int]:
        """Ranks that the next view leaves out, as far as this rank knows."""
        return self._evidence.accused

    @property
    def settled(self) -> bool:
        """True if nothing that this rank knows of calls for another view."""
        waits = self._evidence.own or self._evidence.accused or self._joiners or self._leavers
        return self.joined and not (waits or self.frozen)

    @property
    def joined(self) -> bool:
        """True once this rank is a member of its view."""
        return self.rank in self.view.members

    def suspect(self, rank: int, *, certified: bool, reason: str, now: float) -> None:
        """Record evidence against a rank: the proof that it acts no more, or a weak suspicion."""
        if self.isolated is not None or not self.joined or rank == self.rank:
            return
        if certified:
            self._joining -= {rank} - set(self.view.members)
            self._certify(rank, reason)
        else:
            self._suspect(rank, reason)
        self.tick(now)

    def withdraw(self, rank: int) -> None:
        """Withdraw this rank's weak suspicion of a rank."""
        if self._evidence.withdraw(rank) and self.isolated is None:
            if not self._evidence.is_cut_off():
                self._cut_off_since = None
            message = Suspicion(self.view.number, rank, False, "", withdrawn=True)
            self._tell(self.view.members, message)

    def admit(self, rank: int, now: float) -> None:
        """Ask for a view with a further rank, whose former process has ended or is isolated."""
        if self.isolated is None and self.joined and rank != self.rank:
            self._certify(rank, "a new process of this rank asks to join")
            self._joining.add(rank)
            self._tell(self.view.members, JoinRequest(self.view.number, rank))
            self.tick(now)

    def leave(self, now: float) -> None:
        """Ask for a view after which this rank takes no part."""
        if self.isolated is None and self.joined:
            self._leaving.add(self.rank)
            self._tell(self.view.members, LeaveRequest(self.view.number, self.rank))
            self.tick(now)

    def receive(self, peer: int, message: MembershipMessage, now: float) -> None:
        """Take a message of a peer."""
        if self.isolated is not None or peer == self.rank or peer in self._evidence.relevant_dead:
            return
        if isinstance(message, Commit):
            self._learn(peer, message.view)
        elif isinstance(message, Suspicion) and message.rank == peer and message.certified:
            self._certify(peer, message.reason)
        elif message.number != self.view.number or not {peer, self.rank} <= set(self.view.members):
            self._catch_up(peer, message.number)
        else:
            if peer in self._evidence.unanswered:
                self.withdraw(peer)
            self._handle(peer, message)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Do what evidence, answers and time call for."""
        if self.isolated is None:
            self._turns.advance(now)
            self._proceed()
            changes = self._evidence.accused or self._joiners or self._leavers
            needed = changes or self.frozen or not self.joined
            (self._take_turn if needed else self._turns.begin)()
            self._check_cut_off()

    def outgoing(self) -> list[tuple[int, MembershipMessage]]:
        """Return the messages to send, each with its destination, in their order."""
        messages, self._outbox = self._outbox, []
        return messages

    @property
    def _joiners(self) -> set[int]:
        """Ranks to add to the next view, in which a former process of theirs has no place."""
        return self._joining - (set(self.view.members) - self._evidence.accused)

    @property
    def _leavers(self) -> set[int]:
        """Ranks that the next view says to be leaving."""
        return self._leaving.intersection(self.view.members) - self._evidence.accused

    def _take_turn(self) -> None:
        """Propose, or ask for a view, if it is this rank's turn."""
        accused, dead = self._evidence.accused, self._evidence.relevant_dead
        doubted = accused | self._evidence.own.keys()
        candidates = [rank for rank in self.view.voters if rank not in doubted]
        votes = self.rank in candidates
        proposal = self._decision.proposal
        outdated = votes and proposal is not None and proposal.dead != dead
        due = self._turns.is_due(self.rank, candidates, accused, at_once=outdated)
        if due and votes:
            self._decision.prepare(dead, self._turns.clock + self._turns.patience)
            self._proceed()
        elif due:
            self._tell(self.view.members, ViewRequest(self.view.number))
            self._tell_wishes()

    def _proceed(self) -> None:
        """Go on with this rank's proposal, unless it must be made again after further deaths."""
        proposal, dead = self._decision.proposal, self._evidence.relevant_dead
        if proposal is None or proposal.dead != dead:
            return
        if self._turns.clock >= proposal.deadline:
            proposal.deadline = math.inf
            for rank in self._decision.missing(self._evidence.accused):
                self._suspect(rank, "it does not answer", until_it_answers=True)
        view = self._decision.proceed(self._evidence.accused, self._joiners, self._leavers)
        if view is not None:
            self._tell({*self.view.members, *view.members}, Commit(view))
            if self.rank in view.members:
                self._enter(view)
            else:
                self._isolate(f"view {view.number} was decided without this rank")

    def _suspect(self, rank: int, reason: str, *, until_it_answers: bool = False) -> None:
        if self._evidence.suspect(rank, reason, until_it_answers=until_it_answers):
            self._tell(self.view.members, Suspicion(self.view.number, rank, False, reason))

    def _enter(self, view: View) -> None:
        """Go on in a decided view, and repeat what evidence is left to those who are in it, too."""
        self.view = view
        self._known.update(view.members)
        self._joining -= set(view.members)
        self._leaving &= set(view.members).difference(view.leaving, view.joined)
        self._evidence.enter(view)
        self._decision = Decision(self.rank, view, self._counts, self._tell)
        self._turns.begin()
        for rank in sorted(self._evidence.relevant_dead):
            self._tell(self.view.members, Suspicion(view.number, rank, True, "it has ended"))
        for rank, reason in self._evidence.own.items():
            self._tell(self.view.members, Suspicion(view.number, rank, False, reason))
        self._tell_wishes()

    def _tell_wishes(self) -> None:
        """Repeat who asks to join and to leave, to members that may not have heard of it."""
        for rank in sorted(self._joining):
            self._tell(self.view.members, JoinRequest(self.view.number, rank))
        for rank in sorted(self._leavers):
            self._tell(self.view.members, LeaveRequest(self.view.number, rank))

    def _learn(self, peer: int, view: View) -> None:
        """Take a decided view from a peer that this rank may believe."""
        mine, votes = self.view, self.rank in self.view.voters
        if not self.joined:
            if view.number > mine.number and self.rank in view.joined:
                self._enter(view)
            return
        if peer not in (mine.voters if votes else mine.members):
            return
        stays = self.rank in view.members and self.rank not in view.joined
        # a view that only dead ranks held does not stand, but they may have told it who has joined
        established = votes and self.rank not in mine.fresh
        rivals = view.number == mine.number and view != mine and not established
        if view.number == mine.number + 1 and stays:
            self._enter(view)
        elif view.number > mine.number or rivals:
            self._isolate(f"rank {peer} says that view {view.number} was decided without this rank")

    def _catch_up(self, peer: int, number: int) -> None:
        """Answer a message of another view with the later view, or with a request for it."""
        if peer not in self._known:
            return
        if number > self.view.number:
            self._tell([peer], ViewRequest(self.view.number))
        elif self.joined:
            self._tell([peer], Commit(self.view))

    def _handle(self, peer: int, message: MembershipMessage) -> None:
        """Take a message of a member that has the same view."""
        if isinstance(message, Suspicion) and message.certified:
            self._certify(message.rank, message.reason)
        elif isinstance(message, Suspicion):
            self._evidence.report(peer, message.rank, withdrawn=message.withdrawn)
        elif isinstance(message, JoinRequest):
            self._joining.add(message.rank)
        elif isinstance(message, LeaveRequest):
            self._leaving.add(message.rank)
        elif isinstance(message, Prepare | Accept):
            if peer == message.ballot.rank and peer in self.view.voters:
                for rank in message.dead:
                    self._certify(rank, f"rank {peer} says that it has ended")
                if self.isolated is None:
                    self._decision.receive(peer, message)
        elif isinstance(message, Promise | Accepted):
            self._decision.receive(peer, message)

    def _certify(self, rank: int, reason: str) -> None:
        if rank == self.rank:
            self._isolate(f"other ranks hold that this rank has ended: {reason}")
        elif self._evidence.certify(rank):
            self._tell(self.view.members, Suspicion(self.view.number, rank, True, reason))

    def _check_cut_off(self) -> None:
        """Isolate this rank after a time in which it trusts too few ranks to decide anything."""
        if not self.joined or not self._evidence.is_cut_off():
            self._cut_off_since = None
        elif self._cut_off_since is None:
            self._cut_off_since = self._turns.clock
        elif self._turns.clock - self._cut_off_since >= _CUT_OFF * self._turns.patience:
            self._isolate(f"too few ranks are left to decide {self._evidence}")

    def _isolate(self, reason: str) -> None:
        """Act no more, and say so: to the others this rank is as good as dead."""
        self._tell(self._known, Suspicion(self.view.number, self.rank, True, reason))
        self.isolated = reason

    def _tell(self, ranks: Collection[int], message: MembershipMessage) -> None:
        self._outbox += [(rank, message) for rank in sorted(ranks) if rank != self.rank]
