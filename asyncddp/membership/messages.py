"""Messages by which ranks agree on the members of an elastic run.

``number`` is that of the sender's view: the next one is what the message helps to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from asyncddp.membership.view import View


class Ballot(NamedTuple):
    """Paxos ballot number, unique to the rank that makes it; higher ballots win."""

    round: int
    rank: int


NO_BALLOT = Ballot(0, -1)
"""The ballot below all others."""


class MessageStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of all messages between ranks: an immutable struct, encoded as an array."""


class Suspicion(MessageStruct, frozen=True, tag=7):
    """Evidence against a rank: a proof of its death, or the weak suspicion of another rank."""

    number: int
    rank: int
    certified: bool
    reason: str
    withdrawn: bool = False  # the sender takes its weak suspicion back


class Prepare(MessageStruct, frozen=True, tag=8):
    """Paxos prepare: asks ranks to pause, and to accept nothing with a lower ballot."""

    number: int
    ballot: Ballot
    dead: tuple[int, ...]  # ranks that act no more, to which no acceptor listens any longer


class Promise(MessageStruct, frozen=True, tag=9):
    """Paxos promise: the highest ballot that the sender has promised, and its operation counts."""

    number: int
    ballot: Ballot
    counts: Mapping[str, int]
    accepted_ballot: Ballot
    accepted: View | None


class Accept(MessageStruct, frozen=True, tag=10):
    """Paxos accept request: asks ranks to accept a proposed set of members."""

    number: int
    ballot: Ballot
    dead: tuple[int, ...]
    view: View


class Accepted(MessageStruct, frozen=True, tag=11):
    """Paxos reply: the sender has accepted the proposal of a ballot."""

    number: int
    ballot: Ballot


class Commit(MessageStruct, frozen=True, tag=12):
    """Notice that a new set of members has been decided."""

    view: View

    @property
    def number(self) -> int:
        """Number of the decided view, which is the sender's."""
        return self.view.number


class ViewRequest(MessageStruct, frozen=True, tag=13):
    """Request to ranks that know a later set of members to send it."""

    number: int


class JoinRequest(MessageStruct, frozen=True, tag=14):
    """Request to add a rank to the next set of members."""

    number: int
    rank: int


class LeaveRequest(MessageStruct, frozen=True, tag=15):
    """Request of a rank to leave the run, at a step on which its members agree."""

    number: int
    rank: int


MembershipMessage: TypeAlias = (
    Suspicion
    | Prepare
    | Promise
    | Accept
    | Accepted
    | Commit
    | ViewRequest
    | JoinRequest
    | LeaveRequest
)
