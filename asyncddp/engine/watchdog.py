"""Watchdog: fails waits that exceed a deadline, need an exited peer, or are deadlocked."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asyncddp.config import Config
from asyncddp.deadline import Deadline
from asyncddp.engine import deadlock
from asyncddp.engine.lost_peers import LostPeers
from asyncddp.engine.message_matching import MessageMatcher
from asyncddp.engine.messages import (
    DeadlockCycle,
    DeadlockProbe,
    ExitAnnouncement,
    MatchKey,
    Message,
    Nack,
    WaitForEdge,
)
from asyncddp.engine.work import PROBE_AFTER, Work
from asyncddp.errors import DeadlockError
from asyncddp.rank_list_text import list_ranks

logger = logging.getLogger("asyncddp")

_MAX_NEVER_SUBMITTED = 64


class Watchdog:
    """Watchdog of one rank's waits: fails a wait that exceeds its deadline or can never end.

    The engine's lock guards it.
    """

    def __init__(self, config: Config, matcher: MessageMatcher, lost_peers: LostPeers) -> None:
        self._config, self._matcher, self._lost_peers = config, matcher, lost_peers
        self._rank, self._size = matcher.rank, matcher.size
        self._blocked: dict[int, Work[Any]] = {}  # by thread
        self._timed_waiters: set[int] = set()  # threads that wait with a time limit of their own
        self.callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that submit
        self._waiting: dict[str, tuple[int, dict[int, float]]] = {}  # collectives: step, who, since
        self._never_submitted: OrderedDict[MatchKey, Nack] = OrderedDict()  # by cycles' keys

    # callers

    @contextmanager
    def blocked(self, work: Work[Any], *, forever: bool) -> Iterator[None]:
        """Mark this thread as blocked in an operation; ``forever`` if without a time limit."""
        thread = threading.get_ident()
        self._blocked[thread] = work
        if not forever:
            self._timed_waiters.add(thread)
        work.next_probe = time.monotonic() + PROBE_AFTER
        try:
            yield
        finally:
            del self._blocked[thread]
            self._timed_waiters.discard(thread)

    @property
    def has_driver(self) -> bool:
        """True while a calling thread waits, and thus drives the engine."""
        return bool(self._blocked)

    def _blocking(self) -> Work[Any] | None:
        """Return the operation that blocks the only calling thread; None if others may submit."""
        callers = sum(thread.is_alive() for thread in list(self.callers))
        blocked = list(self._blocked.values())
        if self._timed_waiters or not len(blocked) == callers == 1 or blocked[0].finished:
            return None
        return blocked[0]

    # peers

    def handle_message(self, peer: int, message: Message) -> Work[Any] | None:
        """Handle a peer's exit, deadlock probe or cycle; return the operation that it fails."""
        if isinstance(message, ExitAnnouncement):
            self._lost_peers.mark_exited(peer, message)
        if not isinstance(message, (DeadlockProbe, DeadlockCycle)):
            return None
        ranks = [link.rank for link in message.chain]
        if not all(0 <= rank < self._size for rank in ranks):
            raise ValueError(f"a chain of ranks {ranks}, where there are {self._size} ranks")
        if isinstance(message, DeadlockProbe):
            return self._receive_probe(message)
        return self._receive_cycle(message.chain)

    def wait_guard(self, what: str) -> Callable[[list[int]], None]:
        """Return a function that limits a one-sided operation's wait for peers.

        Call it repeatedly with the ranks that the operation waits for. It raises a PeerLeftError if
        one of them has left, and a WaitTimeoutError after the deadline.
        """
        deadline, subject = Deadline(self._config), f"rank {self._rank}: {what}"

        def check(peers: list[int]) -> None:
            calls = [(peer, None) for peer in peers]
            if error := self._lost_peers.error_of(subject, calls, time.monotonic()):
                raise error
            waited = deadline.waited()
            missing = f"missing: {list_ranks(peers)}"
            missing = missing if peers else "this rank's device has yet to do its part"
            if deadline.has_passed(waited):
                raise deadline.error(subject, waited, missing)
            if deadline.warns(waited):
                deadline.warn(subject, waited, missing)

        return check

    def _receive_probe(self, probe: DeadlockProbe) -> Work[Any] | None:
        asking = probe.chain[-1]
        self._matcher.refuse_waiting_peer(asking.rank, asking.key)
        self._note_waiting(asking.rank, asking.key)
        nack = self._never_submitted.get(asking.key)
        if nack is not None and not self._matcher.has_submitted(asking.key):
            self._matcher.sends.put(asking.rank, nack)  # its probe could close a second cycle
            return None
        work = self._blocking()
        if work is None:
            return None
        onward, cycle = deadlock.forward_probe(
            probe, self._rank, work.spec.verb, work.missing(), self._matcher.has_submitted
        )
        for peer, longer in onward:
            self._matcher.sends.put(peer, longer)
        if cycle is None:
            return None
        for link in cycle[1:]:
            self._matcher.sends.put(link.rank, DeadlockCycle(cycle))
        return self._fail_deadlocked(work, cycle)

    def _receive_cycle(self, cycle: tuple[WaitForEdge, ...]) -> Work[Any] | None:
        """Fail the operation that blocks this rank, if a cycle found by a peer still holds."""
        work = self._blocking()
        index = [link.rank for link in cycle].index(self._rank)
        if work is None or cycle[index].key not in [key for _, key in work.missing()]:
            return None
        return self._fail_deadlocked(work, (*cycle[index:], *cycle[:index]))

    def _fail_deadlocked(self, work: Work[Any], cycle: tuple[WaitForEdge, ...]) -> Work[Any]:
        """Fail an operation; further peers that wait for the same key as the cycle are refused."""
        error = DeadlockError(
            f"{self.describe_work(work)} can never end: {deadlock.describe_cycle(cycle)}. Call "
            "the same verbs with the same names and neighbours on all of these ranks; "
            f"{self.describe_missing(work)}"
        )
        awaited = cycle[-1].key
        self._never_submitted[awaited] = Nack.of(self._rank, awaited, error)
        if len(self._never_submitted) > _MAX_NEVER_SUBMITTED:
            self._never_submitted.popitem(last=False)
        work.fail(error)
        return work

    # operations

    def check(self, work: Work[Any]) -> bool:
        """Check a waiting operation: fail it, log a warning, or probe its peers for a deadlock.

        Returns whether it has made progress, which renews its deadline. Counting moved pieces is
        slow on the host, and therefore done there only when the deadline is due.
        """
        now, deadline, moved = time.monotonic(), work.deadline, work.has_stepped
        work.has_stepped = False
        if work.spec.stream_ordering is not None:
            moved = work.pieces_moved() or moved
        if self._lost_peers.any and (
            error := self._lost_peers.error_of(self.describe_work(work), work.missing(), now)
        ):
            work.fail(error)
        elif moved or (now > deadline.due and work.pieces_moved()):
            deadline.renew(now)
        elif now > deadline.due:
            waited = now - deadline.started
            if deadline.has_passed(waited):
                missing = self.describe_missing(work)
                work.fail(deadline.error(self.describe_work(work), waited, missing))
            elif deadline.warns(waited):
                self._warn(work, waited)
        if now > work.next_probe and self._blocking() is work:
            work.next_probe = now + min(10.0, max(PROBE_AFTER, now - deadline.started))
            facts = work.spec.verb, work.missing(), work.times_probed
            for peer, probe in deadlock.start_probes(self._rank, *facts):
                self._matcher.sends.put(peer, probe)
            work.times_probed += 1
            for peer in work.joined():
                self._note_waiting(peer, work.key)
        return moved

    def _note_waiting(self, peer: int, key: MatchKey) -> None:
        """Record that a rank waits in the newest collective of a group, and since when."""
        if key.collective:
            step, ranks = self._waiting.get(key.base, (-1, {}))
            if key.step >= step:
                ranks = ranks if key.step == step else {}
                ranks.setdefault(peer, time.monotonic())
                self._waiting[key.base] = key.step, ranks

    def _waiting_with(self, work: Work[Any]) -> Mapping[int, float]:
        """Return the other ranks known to wait in the same collective, with start times."""
        step, ranks = self._waiting.get(work.key.base, (-1, {}))
        return ranks if step == work.key.step else {}

    def _warn(self, work: Work[Any], waited: float) -> None:
        """Log a warning of a long wait; in a collective, only the lowest waiting rank logs."""
        work.deadline.mark_warned()
        others = self._waiting_with(work)
        recent = work.deadline.started + self._config.warn_after / 2
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
        work.deadline.warn(self.describe_work(work), waited, self.describe_missing(work))

    def describe_work(self, work: Work[Any]) -> str:
        """Format this rank and its operation for messages."""
        return f"rank {self._rank}: {work.describe()}"

    def describe_missing(self, work: Work[Any]) -> str:
        """Format the peers that an operation waits for, and their unexpected messages."""
        peers = sorted({peer for peer, _ in work.missing()})
        peers = [peer for peer in peers if peer not in self._waiting_with(work)] or peers
        if not peers:
            return "it waits for its own turn"
        text = f"missing: {list_ranks(peers)}"
        for peer in peers:
            for message in self._matcher.unexpected_from(peer)[:3]:
                text += f"; rank {peer} has sent {message.verb} {message.key} instead"
        return text
