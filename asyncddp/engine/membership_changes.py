"""Changes of membership in an elastic run: which view each round of a rank belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Lock
from types import TracebackType

from asyncddp.engine.messages import COLLECTIVE, Message
from asyncddp.engine.send_queue import SendQueue
from asyncddp.errors import IsolatedError
from asyncddp.membership import Agreement, MembershipMessage, View

ENDED = "<collectives that have ended>"
"""Name by which ranks count the collectives of all ranks that have ended."""
_REMEMBERED = 8  # views to which rounds that are under way may belong


class MembershipChanges:
    """Views of an elastic run on one rank: agrees on them, and assigns rounds to them.

    A round of a name with number k belongs to the newest view whose start of that name is not above
    k, so that all ranks make it along the edges of one graph. The engine's lock guards it.

    Attributes:
        view: The newest view.
        entered: The newest view in which collectives that were interrupted have begun again.
    """

    def __init__(
        self, rank: int, size: int, counts: Callable[[], Mapping[str, int]], sends: SendQueue
    ) -> None:
        self._rank, self._sends = rank, sends
        self._agreement = Agreement(rank, range(size), counts)
        self.view = self.entered = self._agreement.view
        self._views = [self.view]

    @property
    def collective(self) -> str:
        """Name by which collectives of all members are counted and matched."""
        number = self.view.number
        return f"<collective of view {number}>" if number else COLLECTIVE

    @property
    def frozen(self) -> bool:
        """True while ranks agree on the next view, so that no round may begin."""
        agreement = self._agreement
        return agreement.frozen or agreement.view is not self.entered

    def certify(self, peer: int, reason: str) -> None:
        """Record that a rank has ended."""
        self._agreement.suspect(peer, certified=True, reason=reason, now=time.monotonic())

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
        if agreement.view is self.view:
            return None
        self.view = agreement.view
        self._views = [*self._views, self.view][-_REMEMBERED:]
        return self.view

    def view_at(self, name: str, number: int) -> View:
        """Return the view to which a round of a name belongs."""
        for view in reversed(self._views):
            if view.starts.get(name, 0) <= number:
                return view
        return self._views[0]


class GatedLock:
    """Lock that callers do not get while ranks agree on a view, so that they begin nothing.

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
