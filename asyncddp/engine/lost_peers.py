"""Lost peers: ranks that have exited or failed, or whose messages cannot be read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import PeerExit
from asyncddp.engine.work import Work
from asyncddp.errors import PeerError, PeerLeftError

_GRACE = 0.5  # seconds for messages that a rank sent before its exit
_RAISED = "it raised "  # begins the reason of a rank that has failed


class _ExitedPeer(NamedTuple):
    """Record of a rank that has exited: why, when, and after how many collectives of each kind."""

    reason: str
    collective_counts: Mapping[str, int]
    since: float
    failed: bool = False


class LostPeers:
    """Peers that have exited or failed, and the errors raised by operations that need them.

    The engine's lock guards it.

    Args:
        matcher: The rank's message matcher.

    Attributes:
        any: True while there are lost peers.
    """

    def __init__(self, matcher: MessageMatcher) -> None:
        self._matcher, self._rank = matcher, matcher.rank
        self._exited: dict[int, _ExitedPeer] = {}
        self._unreadable: dict[int, PeerError] = {}  # peers whose messages cannot be read
        self.any = False

    def mark_exited(self, peer: int, message: PeerExit) -> None:
        """Note that a peer has announced its exit."""
        self._exited[peer] = _ExitedPeer(
            message.reason, message.collective_counts, time.monotonic()
        )
        self.any = True

    def mark_failed(self, peer: int, reason: str) -> None:
        """Note that a peer has failed; operations that need it fail after a moment."""
        self._exited[peer] = _ExitedPeer(reason, {}, time.monotonic(), failed=True)
        self.any = True

    def mark_unreadable(self, peer: int, error: Exception, *, tell_next_verb: bool) -> None:
        """Note that a peer's messages cannot be read; operations that need it fail."""
        problem = (
            f"rank {self._rank}: a message of rank {peer} cannot be read "
            f"({type(error).__name__}: {error}); run the same version of asyncddp on all ranks"
        )
        known = self._unreadable.setdefault(peer, PeerError(problem))
        self.any = True
        if tell_next_verb:
            self._matcher.channels.fail_next_call(known)

    def has_exited(self, peer: int) -> bool:
        """Tell whether a rank has announced its exit, without having failed."""
        exited = self._exited.get(peer)
        return exited is not None and not exited.failed

    def readmit(self) -> None:
        """Forget all exits: the peers are back."""
        self.any = bool(self._unreadable)  # first, since another thread may mark a failed peer
        self._exited.clear()

    def error_of_wait(self, what: str, peers: Sequence[int], now: float) -> PeerError | None:
        """Return the error of a wait for ``peers``, named ``what``, if one of them is lost."""
        unreadable = self._unreadable_error(peers)
        if unreadable is not None:
            return unreadable
        for peer in peers:
            exited = self._exited.get(peer)
            if exited is not None and now - exited.since > _GRACE:
                return _peer_left_error(f"rank {self._rank}: {what}", peer, exited)
        return None

    def error_of_work(self, work: Work[Any], now: float) -> PeerError | None:
        """Return the error of an operation, if it waits for a lost peer."""
        unreadable = self._unreadable_error(peer for peer, _ in work.missing())
        peer = self._find_exited(work, now) if unreadable is None else None
        if peer is None:
            return unreadable
        subject = f"rank {self._rank}: {work.describe()}"
        return _peer_left_error(subject, peer, self._exited[peer])

    def _unreadable_error(self, peers: Iterable[int]) -> PeerError | None:
        """Return the error about the first of some peers whose messages cannot be read."""
        known = next((self._unreadable[peer] for peer in peers if peer in self._unreadable), None)
        if known is None:
            return None
        self._matcher.channels.discard_error(known)
        return PeerError(str(known))

    def _find_exited(self, work: Work[Any], now: float) -> int | None:
        """Return a peer that an operation waits for, but that has exited, if there is one."""
        for peer, key in work.missing():
            exited = self._exited.get(peer)
            if exited is None or now - exited.since < _GRACE:
                continue
            if key.step >= exited.collective_counts.get(key.base, 0):
                return peer
        return None


def _peer_left_error(subject: str, peer: int, exited: _ExitedPeer) -> PeerLeftError:
    """Build the error of a rank that needs an exited peer, with advice on the likely cause."""
    advice = ""
    if not exited.reason.startswith(_RAISED):
        advice = (
            "; if ranks have different numbers of batches, put the training loop inside "
            "`with bf.join(optimizer):`"
        )
    error = PeerLeftError(
        f"{subject}: rank {peer} has left ({exited.reason}), but is needed{advice}"
    )
    error.origin = peer
    return error
