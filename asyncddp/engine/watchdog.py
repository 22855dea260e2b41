"""Watchdog: bounds every wait by deadlines, exited peers, and the detection of deadlocks."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from asyncddp.config import Config
from asyncddp.engine import deadlock
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import (
    DeadlockCycle,
    DeadlockProbe,
    MatchKey,
    Message,
    PeerExit,
    WaitForEdge,
)
from asyncddp.engine.work import Work
from asyncddp.errors import DeadlockError, PeerError, PeerLeftError, WaitTimeoutError
from asyncddp.rank_lists import list_ranks

logger = logging.getLogger("asyncddp")

_GRACE = 0.5  # seconds for messages that a rank sent before its exit
_RAISED = "it raised "  # begins the reason of a rank that has failed
_PROBE_AFTER = 0.25  # seconds of waiting before the peers are asked whether they wait as well


class _ExitedPeer(NamedTuple):
    """Record of a rank that has exited: why, when, and after how many collectives of each kind."""

    reason: str
    collective_counts: Mapping[str, int]
    since: float
    failed: bool = False


class Watchdog:
    """Watchdog of one rank's waits: fails those that exceed a deadline or can never end.

    The engine's lock guards it.

    Args:
        config: Deadlines.
        matcher: The rank's message matcher, through which it also asks the peers.
        submitted: Tells whether this rank has submitted a key.
    """

    def __init__(
        self, config: Config, matcher: MessageMatcher, submitted: Callable[[MatchKey], bool]
    ) -> None:
        self._config, self._matcher, self._submitted = config, matcher, submitted
        self._rank, self._size = matcher.rank, matcher.size
        self._exited: dict[int, _ExitedPeer] = {}
        self._unreadable: dict[int, PeerError] = {}  # peers whose messages cannot be read
        self._blocked: dict[int, Work[Any]] = {}  # by thread
        self._timed_waiters: set[int] = set()  # threads that wait with a time limit of their own
        self._callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._waiting: dict[str, tuple[int, dict[int, float]]] = {}  # collectives: step, who, since

    # callers

    def register_caller(self) -> None:
        """Note that the calling thread submits operations."""
        self._callers.add(threading.current_thread())

    @contextmanager
    def blocked(self, work: Work[Any], *, forever: bool) -> Iterator[None]:
        """Mark the calling thread as blocked in an operation while inside.

        Args:
            work: The operation.
            forever: Whether the thread waits without a time limit of its own.
        """
        thread = threading.get_ident()
        self._blocked[thread] = work
        if not forever:
            self._timed_waiters.add(thread)
        work.next_probe = time.monotonic() + _PROBE_AFTER
        try:
            yield
        finally:
            del self._blocked[thread]
            self._timed_waiters.discard(thread)

    @property
    def has_driver(self) -> bool:
        """True while some caller waits, and so drives the engine."""
        return bool(self._blocked)

    def _blocking(self) -> Work[Any] | None:
        """Return the operation this rank is blocked in, if it can submit nothing else meanwhile."""
        callers = sum(thread.is_alive() for thread in list(self._callers))
        blocked = list(self._blocked.values())
        if self._timed_waiters or not len(blocked) == callers == 1 or blocked[0].finished.is_set():
            return None
        return blocked[0]

    # peers

    def handle_message(self, peer: int, message: Message) -> Work[Any] | None:
        """Handle a message that is not about an exchange; return the operation it fails, if any.

        Raises:
            ValueError: It names a rank that does not exist.
        """
        if isinstance(message, (DeadlockProbe, DeadlockCycle)):
            ranks = [link.rank for link in message.chain]
            if not all(0 <= rank < self._size for rank in ranks):
                raise ValueError(f"a chain of ranks {ranks}, where there are {self._size} ranks")
        if isinstance(message, PeerExit):
            self._exited[peer] = _ExitedPeer(
                message.reason, message.collective_counts, time.monotonic()
            )
        elif isinstance(message, DeadlockProbe):
            return self._receive_probe(message)
        elif isinstance(message, DeadlockCycle):
            return self._receive_cycle(message.chain)
        return None

    def mark_failed(self, peer: int, reason: str) -> None:
        """Note that a peer has failed; operations that need it fail after a moment."""
        self._exited[peer] = _ExitedPeer(reason, {}, time.monotonic(), failed=True)

    def has_exited(self, peer: int) -> bool:
        """Tell whether a rank has announced its exit, without having failed."""
        exited = self._exited.get(peer)
        return exited is not None and not exited.failed

    def mark_unreadable(self, peer: int, error: Exception, *, tell_next_verb: bool) -> None:
        """Note that a peer's messages cannot be read; operations that need it fail."""
        problem = (
            f"rank {self._rank}: a message of rank {peer} cannot be read "
            f"({type(error).__name__}: {error}); run the same version of asyncddp on all ranks"
        )
        known = self._unreadable.setdefault(peer, PeerError(problem))
        if tell_next_verb:
            self._matcher.fail_next_call(known)

    def _unreadable_error(self, peers: Iterable[int]) -> PeerError | None:
        """Return the error about the first of some peers whose messages cannot be read."""
        known = next((self._unreadable[peer] for peer in peers if peer in self._unreadable), None)
        if known is None:
            return None
        self._matcher.channels.discard_error(known)
        return PeerError(str(known))

    def wait_guard(self, what: str) -> Callable[[list[int]], None]:
        """Return a function that bounds a wait for peers in a one-sided operation.

        Args:
            what: The name of what is waited for, for messages.

        Returns:
            A function to call repeatedly with the ranks that have yet to do their part. It raises
            PeerLeftError when one of them has left and WaitTimeoutError after the deadline.
        """
        since, config, warned = time.monotonic(), self._config, False

        def check(peers: list[int]) -> None:
            """Raise if one of the peers has left, or the deadline has passed."""
            nonlocal warned
            now = time.monotonic()
            unreadable = self._unreadable_error(peers)
            if unreadable is not None:
                raise unreadable
            for peer in peers:
                exited = self._exited.get(peer)
                if exited is not None and now - exited.since > _GRACE:
                    raise _peer_left_error(f"rank {self._rank}: {what}", peer, exited)
            missing = f"missing: {list_ranks(peers)}"
            missing = missing if peers else "this rank's device has yet to do its part"
            if now - since > config.timeout:
                raise WaitTimeoutError(
                    f"rank {self._rank}: {what} was not done in {now - since:.1f} s "
                    f"(ASYNCDDP_TIMEOUT={config.timeout:g}); {missing}"
                )
            if now - since > config.warn_after and not warned:
                warned = True
                waited = now - since
                logger.warning(
                    "rank %d: %s has been waiting for %.0f s; %s", self._rank, what, waited, missing
                )

        return check

    def readmit_peers(self) -> None:
        """Forget all exits: the peers are back."""
        self._exited.clear()

    def _receive_probe(self, probe: DeadlockProbe) -> Work[Any] | None:
        asking = probe.chain[-1]
        self._matcher.refuse_waiting_peer(asking.rank, asking.key)
        self._note_waiting(asking.rank, asking.key)
        work = self._blocking()
        if work is None:
            return None
        missing, verb = work.missing(), work.spec.verb
        onward, cycle = deadlock.forward_probe(probe, self._rank, verb, missing, self._submitted)
        for peer, longer in onward:
            self._matcher.put(peer, longer)
        if cycle is None:
            return None
        for link in cycle[1:]:
            self._matcher.put(link.rank, DeadlockCycle(cycle))
        return self._fail_deadlocked(work, cycle)

    def _receive_cycle(self, cycle: tuple[WaitForEdge, ...]) -> Work[Any] | None:
        """Fail the operation this rank is blocked in, if a cycle found by a peer still holds."""
        work = self._blocking()
        index = [link.rank for link in cycle].index(self._rank)
        if work is None or cycle[index].key not in [key for _, key in work.missing()]:
            return None
        return self._fail_deadlocked(work, (*cycle[index:], *cycle[:index]))

    def _fail_deadlocked(self, work: Work[Any], cycle: tuple[WaitForEdge, ...]) -> Work[Any]:
        work.fail(
            DeadlockError(
                f"{self.describe_work(work)} can never end: {deadlock.describe_cycle(cycle)}. Call "
                "the same verbs with the same names and neighbours on all of these ranks; "
                f"{self.describe_missing(work)}"
            )
        )
        return work

    # operations

    def check(self, work: Work[Any]) -> None:
        """Check one waiting operation: fail it, warn, or probe its peers for a deadlock."""
        now = time.monotonic()
        waited = now - work.started
        if self._unreadable:
            unreadable = self._unreadable_error(peer for peer, _ in work.missing())
            if unreadable is not None:
                work.fail(unreadable)
                return
        peer = self._find_exited(work, now) if self._exited else None
        if peer is not None:
            work.fail(_peer_left_error(self.describe_work(work), peer, self._exited[peer]))
        elif now > work.deadline:
            work.fail(
                WaitTimeoutError(
                    f"{self.describe_work(work)} was not done in {waited:.1f} s "
                    f"(ASYNCDDP_TIMEOUT={self._config.timeout:g}); {self.describe_missing(work)}"
                )
            )
        elif waited > self._config.warn_after and not work.warned:
            work.warned = True
            self._warn(work, waited)
        if now > work.next_probe and self._blocking() is work:
            work.next_probe = now + min(10.0, max(_PROBE_AFTER, waited))
            missing, verb = work.missing(), work.spec.verb
            for peer, probe in deadlock.start_probes(self._rank, verb, missing):
                self._matcher.put(peer, probe)

    def _note_waiting(self, peer: int, key: MatchKey) -> None:
        """Note a rank that waits in the newest collective of a kind, as its probe has told."""
        if key.collective:
            step, ranks = self._waiting.get(key.base, (-1, {}))
            if key.step >= step:
                ranks = ranks if key.step == step else {}
                ranks.setdefault(peer, time.monotonic())
                self._waiting[key.base] = key.step, ranks

    def _waiting_with(self, work: Work[Any]) -> Mapping[int, float]:
        """Return other ranks known to wait in the same collective, and since when."""
        step, ranks = self._waiting.get(work.key.base, (-1, {}))
        return ranks if step == work.key.step else {}

    def _warn(self, work: Work[Any], waited: float) -> None:
        """Log a warning of a long wait; of several ranks in one collective only the lowest does."""
        others = self._waiting_with(work)
        recent = work.started + self._config.warn_after / 2
        if any(peer < self._rank and since < recent for peer, since in others.items()):
            return
        late = {peer for peer, _ in work.missing()}.difference(others)
        if others and late:
            logger.warning(
                "%d ranks (%s) wait for %s, in %s, since %.0f s",
                len(others) + 1,
                list_ranks([self._rank, *others]).partition(" ")[2],
                list_ranks(late),
                work.describe(),
                waited,
            )
            return
        subject, missing = self.describe_work(work), self.describe_missing(work)
        logger.warning("%s has been waiting for %.0f s; %s", subject, waited, missing)

    def _find_exited(self, work: Work[Any], now: float) -> int | None:
        """Return a peer that an operation waits for, but that has exited, if there is one."""
        for peer, key in work.missing():
            exited = self._exited.get(peer)
            if exited is None or now - exited.since < _GRACE:
                continue
            if key.step >= exited.collective_counts.get(key.base, 0):
                return peer
        return None

    def describe_work(self, work: Work[Any]) -> str:
        """Describe this rank and its operation, for messages."""
        return f"rank {self._rank}: {work.describe()}"

    def describe_missing(self, work: Work[Any]) -> str:
        """Describe the peers that an operation waits for, and what they have sent instead."""
        peers = sorted({peer for peer, _ in work.missing()})
        peers = [peer for peer in peers if peer not in self._waiting_with(work)] or peers
        if not peers:
            return "it waits for its own turn"
        text = f"missing: {list_ranks(peers)}"
        for peer in peers:
            for message in self._matcher.unexpected_from(peer)[:3]:
                text += f"; rank {peer} has sent {message.verb} {message.key} instead"
        return text


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
