"""Membership changes of an elastic run: which ranks take part in each round of an operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from threading import Lock
from types import TracebackType

import msgspec

from asyncddp.engine.messages import COLLECTIVE, Message
from asyncddp.engine.send_queue import SendQueue
from asyncddp.errors import IsolatedError
from asyncddp.membership import Agreement, MembershipMessage, View

ENDED = "<collectives that have ended>"
"""Name by which ranks count the collectives of all ranks that have ended."""
STEP = "<step>"
"""Name by which they agree on the step from which ranks that join take part."""
_REMEMBERED = 8  # views to which rounds that are under way may belong


class MembershipChanges:
    """Membership of an elastic run, as one rank knows it: ranks agree on changes between rounds.

    A round of a name with number k belongs to the newest view whose start of that name is not above
    k, so that all ranks make it along the edges of one graph. Ranks that join take part from one
    step on, which all ranks begin in that view. The engine's lock guards it.

    Args:
        rank: Rank of this process.
        size: Number of ranks at the start.
        counts: Function that returns how often each name has been used.
        sends: Queue of messages.
        outside: View of the others, which this rank is to join; None if it began with them.
        agreement: The agreement on views; None makes one among these ranks.

    Attributes:
        view: The newest view, without ranks that do not take part yet.
        last_loss: Number of the newest view that has left members out.
        gone: Members of the agreement that take no part any more.
        last_join: Number of the newest view in which a process has taken a lost rank's place.
        replaced: Number of the newest view that lets another process be a rank, if one did.
        last_change: Number of the newest view in which each rank left or joined, if it did.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        counts: Callable[[], Mapping[str, int]],
        sends: SendQueue,
        outside: View | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._rank, self._sends = rank, sends
        if outside is None:
            self._agreement = agreement or Agreement(rank, range(size), counts)
            self.view = self._agreement.view
        else:
            number = outside.number
            others = set(outside.members) - {rank}  # which may not know yet who has died
            self._agreement = Agreement(rank, others, counts, number=number)
            self.view = View.first([rank], max(1, number))
        self._agreed = self._known = self._entered = self._agreement.view
        self._views = [self.view]
        self.last_join = 0
        self.replaced: dict[int, int] = {}
        self.last_change: dict[int, int] = {} if outside is None else {rank: self.view.number}
        self.last_loss = 0 if outside is None else -1  # what a rank does alone has another name
        self._joining: dict[int, int] = {}  # members, with the step from which they take part
        self._leaving: dict[int, int] = {}  # members, with the step from which they take none
        self.gone: set[int] = set()  # members that take no part any more

    @property
    def collective(self) -> str:
        """Name by which collectives of all members are counted and matched."""
        number = self.last_loss
        return f"<collective of view {number}>" if number else COLLECTIVE

    @property
    def accused(self) -> frozenset[int]:
        """Ranks that the next view leaves out, as far as this rank knows."""
        return self._agreement.accused

    @property
    def isolated(self) -> str | None:
        """Why the others go on without this rank; None while it takes part."""
        return self._agreement.isolated

    @property
    def settled(self) -> bool:
        """True if nothing that this rank knows of calls for another view."""
        return self._agreement.settled

    @property
    def loses(self) -> bool:
        """True if the next view leaves members out, with which no collective can end."""
        return not self.gone.issuperset(self.accused)

    @property
    def frozen(self) -> bool:
        """True while ranks agree on the next view, so that no round may begin."""
        agreement = self._agreement
        return agreement.frozen or agreement.view is not self._entered

    @property
    def awaits_part(self) -> bool:
        """True on a rank that joins, until it takes part."""
        return self._rank in self._joining or not self._agreement.joined

    def view_to_join(self) -> View | None:
        """Return the view in which this rank is to take part; ``joined`` are those that join."""
        if self._rank not in self._joining:
            return None
        return msgspec.structs.replace(self._agreed, joined=tuple(sorted(self._joining)))

    def first_step(self) -> int:
        """Return the step from which this rank takes part."""
        return self._joining[self._rank]

    @property
    def agreed(self) -> View:
        """The newest view, with ranks that do not take part yet."""
        return self._agreed

    def suspect(self, peer: int, reason: str, *, certified: bool) -> None:
        """Record that a rank has ended, or is out of reach: then more than half must say so."""
        self._agreement.suspect(peer, certified=certified, reason=reason, now=time.monotonic())

    def admit(self, rank: int) -> None:
        """Ask for a view with a new process of a rank, unless one that may have it is to begin."""
        if self._agreement.view is self._known:
            self._agreement.admit(rank, time.monotonic())

    @property
    def has_leavers(self) -> bool:
        """True while the agreement has members that take no part any more, or soon will not."""
        return bool(self._leaving or self.gone)

    def leave(self) -> None:
        """Ask for a view after which this rank takes no part."""
        self._agreement.leave(time.monotonic())

    def receive(self, peer: int, message: Message) -> None:
        """Take a message about membership; others are not meant."""
        if isinstance(message, MembershipMessage):
            self._agreement.receive(peer, message, time.monotonic())

    def progress(self) -> View | None:
        """Go on with the agreement, and send its messages; return a view that has begun.

        Raises an IsolatedError if the others go on without this rank.
        """
        agreement = self._agreement
        if not agreement.settled:
            agreement.tick(time.monotonic())
        for peer, message in agreement.outgoing():
            self._sends.put(peer, message)
        if agreement.isolated is not None:
            raise IsolatedError(f"{agreement.isolated}; end this rank")
        if agreement.view is self._known:
            return None
        self._known = agreement.view
        step, members = self._known.starts.get(STEP, 0), self._known.members
        lost = set(self._known.left) - self.gone
        stay = set(members).difference(self._known.joined)
        self.gone &= stay
        self._agreed = agreed = msgspec.structs.replace(self._known, left=tuple(sorted(lost)))
        self.replaced |= dict.fromkeys(agreed.joined, agreed.number)
        joining = self._joining | dict.fromkeys(agreed.joined, step)
        leaving = dict.fromkeys(agreed.leaving, step) | self._leaving
        self._joining = {rank: first for rank, first in joining.items() if rank in members}
        self._leaving = {rank: last for rank, last in leaving.items() if rank in stay}
        if lost and not self.awaits_part:
            self.last_loss = agreed.number
            self._begin(agreed, set(members) - self._joining.keys() - self.gone)
        return agreed

    def enter(self) -> None:
        """Let rounds of the agreed view begin; interrupted collectives have begun again."""
        self._entered = self._known

    def take_in(self, step: int, starts: Mapping[str, int]) -> View | None:
        """Begin a step; return the view that begins with it, if ranks join or leave with it."""
        joined = {rank for rank, first in self._joining.items() if first <= step}
        left = {rank for rank, first in self._leaving.items() if first <= step}
        if not (joined or left):
            return None
        self._joining = {rank: n for rank, n in self._joining.items() if rank not in joined}
        self._leaving = {rank: n for rank, n in self._leaving.items() if rank not in left}
        self.gone |= left
        if left:
            self.last_loss = self._agreed.number
        members = set(self._agreed.members) - self._joining.keys() - self.gone
        agreed = msgspec.structs.replace(self._agreed, starts=starts, left=tuple(sorted(left)))
        if not members:  # all leave, and may make collectives as before
            return msgspec.structs.replace(agreed, members=())
        return self._begin(agreed, members, joined)

    def _begin(self, agreed: View, members: Collection[int], joined: Collection[int] = ()) -> View:
        taking_part = tuple(sorted(members))
        self.view = msgspec.structs.replace(
            agreed, members=taking_part, joined=tuple(sorted(joined))
        )
        if joined:
            self.last_join = agreed.number
        self.last_change |= dict.fromkeys((*agreed.left, *joined), agreed.number)
        self._views = [*self._views, self.view][-_REMEMBERED:]
        return self.view

    def views_after(self, number: int) -> list[View]:
        """Return the views after one, as far as they are remembered."""
        return [view for view in self._views if view.number > number]

    def view_at(self, name: str, number: int) -> View:
        """Return the view to which a round of a name belongs."""
        for view in reversed(self._views):
            if view.starts.get(name, 0) <= number:
                return view
        return self._views[0]


class GatedLock:
    """Lock that no caller gets while ranks agree on new members, so that no operation begins.

    Args:
        lock: The lock.
        wait: Waits a moment, without the lock, if ranks agree on a view; returns whether they do.
    """

    def __init__(self, lock: Lock, wait: Callable[[], bool]) -> None:
        self._lock, self._wait = lock, wait

    def __enter__(self) -> None:
        """Acquire the lock, once no agreement is under way."""
        self._lock.acquire()
        try:
            while self._wait():
                pass
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._lock.release()
