"""Lost peers: ranks that have exited or failed, or that send unreadable messages."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import ExitAnnouncement, MatchKey
from asyncddp.errors import PeerError, PeerLeftError
from asyncddp.transport.base import ExitRecord

# seconds for collectives that a peer, or one that has failed, has ended, and other ranks have not
_TIME_TO_END, _TIME_AFTER_FAILURE = 5.0, 0.05
_GRACE = 0.5  # seconds for messages that a rank sent before its exit
_RAISED = "it raised "  # begins the reason of a rank that has failed
_ADVICE = (
    "; if ranks have different numbers of batches, put the training loop inside "
    "`with bf.join(optimizer):`"
)


class LostPeers:
    """Record of lost peers, and of the errors of operations that need them.

    The engine's lock guards it. ``shared`` are exit records that all ranks of this process share;
    without them each rank records the exits that peers announce to it.
    """

    def __init__(
        self, matcher: MessageMatcher, shared: dict[int, ExitRecord] | None = None
    ) -> None:
        self._matcher, self._rank = matcher, matcher.rank
        self._exited: dict[int, ExitRecord] = {} if shared is None else shared
        self._unreadable: dict[int, PeerError] = {}  # peers whose messages cannot be read
        self._draining: set[int] = set()  # peers whose last messages may be on their way
        self._drained: set[int] = set()
        self._outside: set[int] = set()  # peers without which a view can be agreed on

    @property
    def any(self) -> bool:
        """True if there are lost peers."""
        return bool(self._exited) or bool(self._unreadable)

    def mark_exited(self, peer: int, message: ExitAnnouncement) -> None:
        """Record that a peer has announced its exit, unless it is known to have failed before."""
        if self.has_failed(peer):
            return
        counts = message.collective_counts
        self._exited[peer] = ExitRecord(message.reason, counts, time.monotonic())

    def mark_failed(self, peer: int, reason: str) -> None:
        """Record that a peer has failed; operations that need it fail after a moment."""
        self._exited[peer] = ExitRecord(reason, {}, time.monotonic(), failed=True)

    def mark_dead(self, failed: Mapping[int, str]) -> None:
        """Record peers that the transport reports dead, unless they have announced their exit."""
        for peer, reason in failed.items():
            if peer not in self._exited:
                self.mark_failed(peer, reason)

    def mark_unreadable(self, peer: int, error: Exception, *, tell_next_verb: bool) -> None:
        """Record that a peer's messages cannot be read; operations that need it fail."""
        problem = (
            f"rank {self._rank}: a message of rank {peer} cannot be read "
            f"({type(error).__name__}: {error}); run the same version of asyncddp on all ranks"
        )
        known = self._unreadable.setdefault(peer, PeerError(problem))
        if tell_next_verb:
            self._matcher.channels.fail_next_call(known)

    def has_exited(self, peer: int) -> bool:
        """Return whether a rank has exited or failed."""
        return peer in self._exited

    def has_failed(self, peer: int) -> bool:
        """Return whether a rank was killed or has raised, so that its values are ignored."""
        exited = self._exited.get(peer)
        return exited is not None and _has_failed(exited)

    def is_lost(self, peer: int) -> bool:
        """Return whether a rank has exited, failed, or sent unreadable messages."""
        return peer in self._exited or peer in self._unreadable

    def drained(self) -> set[int]:
        """Return the lost peers that were known at the last call; each is returned once."""
        left, self._draining = self._draining, self._exited.keys() - self._drained - {self._rank}
        ended = left & self._draining
        self._draining -= ended
        self._drained |= ended
        return ended

    def outside(self, gone: Collection[int]) -> list[tuple[int, str]]:
        """Return peers without which the others can go on, and why; each is returned once.

        A peer that has left in an orderly way has done its part in collectives that others have
        yet to end, for which they get time; of those that are ``gone`` nobody waits for anything.
        """
        now = time.monotonic()
        found = [
            (peer, exited.reason)
            for peer, exited in self._exited.items()
            if peer in self._drained - self._outside
            and now - exited.since
            > (_TIME_AFTER_FAILURE if peer in gone or _has_failed(exited) else _TIME_TO_END)
        ]
        self._outside.update(peer for peer, _ in found)
        return found

    def readmit(self, peer: int | None = None) -> None:
        """Clear the records of exited peers, which have rejoined; by default of all."""
        peers = set(self._exited) if peer is None else {peer}
        for one in peers:
            self._exited.pop(one, None)
        self._draining -= peers
        self._drained -= peers
        self._outside -= peers

    def error_of(
        self, subject: str, missing: Sequence[tuple[int, MatchKey | None]], now: float
    ) -> PeerError | None:
        """Return the error of an operation that waits for a lost peer; None if no peer is lost."""
        for peer, _ in missing:
            known = self._unreadable.get(peer)
            if known is not None:
                self._matcher.channels.discard_error(known)
                return PeerError(str(known))
        for peer, key in missing:
            exited = self._exited.get(peer)
            if exited is None or now - exited.since < _GRACE:
                continue
            if key is None or key.step >= exited.collective_counts.get(key.base, 0):
                advice = "" if _has_failed(exited) else _ADVICE
                error = PeerLeftError(
                    f"{subject}: rank {peer} has left ({exited.reason}), but is needed{advice}"
                )
                error.origin = peer
                return error
        return None


def _has_failed(exited: ExitRecord) -> bool:
    return exited.failed or exited.reason.startswith(_RAISED)
