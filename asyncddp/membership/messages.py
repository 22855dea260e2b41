"""Messages of the agreement on views; they extend the messages of the engine.

``number`` is that of the sender's view: the next one is what the message helps to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from asyncddp.membership.view import View


class Ballot(NamedTuple):
    """Number of an attempt to decide a view, unique to the rank that makes it; higher ones win."""

    round: int
    rank: int


NO_BALLOT = Ballot(0, -1)
"""The ballot below all others."""


class MessageStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of all messages: an immutable struct, encoded as an array of its fields."""


class Suspicion(MessageStruct, frozen=True, tag=7):
    """Evidence against a rank: the proof that it acts no more, or one rank's weak suspicion."""

    number: int
    rank: int
    certified: bool
    reason: str
    withdrawn: bool = False  # the sender takes its weak suspicion back


class Prepare(MessageStruct, frozen=True, tag=8):
    """Request to freeze, and to promise to accept nothing of a lower ballot."""

    number: int
    ballot: Ballot
    dead: tuple[int, ...]  # ranks that act no more, to which no acceptor listens any longer


class Promise(MessageStruct, frozen=True, tag=9):
    """Highest ballot that the sender has promised, with its counts; a refusal of lower ballots."""

    number: int
    ballot: Ballot
    counts: Mapping[str, int]
    accepted_ballot: Ballot
    accepted: View | None


class Accept(MessageStruct, frozen=True, tag=10):
    """Request to accept a view."""

    number: int
    ballot: Ballot
    dead: tuple[int, ...]
    view: View


class Accepted(MessageStruct, frozen=True, tag=11):
    """Answer of a rank that has accepted the view of a ballot."""

    number: int
    ballot: Ballot


class Commit(MessageStruct, frozen=True, tag=12):
    """Notice of a view that is decided."""

    view: View

    @property
    def number(self) -> int:
        """Number of the decided view, which is the sender's."""
        return self.view.number


class ViewRequest(MessageStruct, frozen=True, tag=13):
    """Request for the view of whoever has a later one."""

    number: int


class JoinRequest(MessageStruct, frozen=True, tag=14):
    """Request to add a rank to the next view."""

    number: int
    rank: int


class LeaveRequest(MessageStruct, frozen=True, tag=15):
    """Request for a view after which a rank takes no part."""

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
