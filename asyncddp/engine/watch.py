"""Keeps every wait bounded: deadlines, ranks that have left, ranks that wait in a circle."""

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
from asyncddp.engine.mailbox import Mailbox
from asyncddp.engine.messages import Circle, Key, Leave, Message, Probe, Waiting
from asyncddp.engine.operation import Operation
from asyncddp.errors import DeadlockError, PeerError, PeerLeftError, WaitTimeoutError
from asyncddp.rank_lists import list_ranks

__all__ = ["Watch"]

logger = logging.getLogger("asyncddp")

_GRACE = 0.5  # seconds for what a rank sent before it left
_RAISED = "it raised "  # how the reason of a rank begins that has failed
_PROBE_AFTER = 0.25  # seconds of waiting before the peers are asked whether they wait as well


class _Gone(NamedTuple):
    """A rank that has left: why, after how many collectives of each kind, and since when.

    One that failed is awaited in vain; one that has ended well was done.
    """

    reason: str
    joined: Mapping[str, int]
    since: float
    failed: bool = False


class Watch:
    """What one rank knows about why it waits. The engine's lock guards it.

    Args:
        config: Deadlines.
        mailbox: What peers have sent, and the way to ask them.
        submitted: Whether this rank has submitted a key.
    """

    def __init__(self, config: Config, mailbox: Mailbox, submitted: Callable[[Key], bool]) -> None:
        self._config, self._mailbox, self._submitted = config, mailbox, submitted
        self._rank, self._size = mailbox.rank, mailbox.size
        self._gone: dict[int, _Gone] = {}
        self._unreadable: dict[int, PeerError] = {}  # peers whose messages cannot be read
        self._blocked: dict[int, Operation[Any]] = {}  # thread → what it waits for
        self._impatient: set[int] = set()  # threads that give up waiting by themselves
        self._callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._waiting: dict[str, tuple[int, dict[int, float]]] = {}  # collectives: step, who, since

    # what the callers do

    def entered(self) -> None:
        """The calling thread submits verbs."""
        self._callers.add(threading.current_thread())

    @contextmanager
    def blocked(self, operation: Operation[Any], *, forever: bool) -> Iterator[None]:
        """While inside, the calling thread does nothing but wait for an operation.

        Args:
            operation: What it waits for.
            forever: Whether it cannot do anything else before the operation ends.
        """
        thread = threading.get_ident()
        self._blocked[thread] = operation
        if not forever:
            self._impatient.add(thread)
        operation.next_probe = time.monotonic() + _PROBE_AFTER
        try:
            yield
        finally:
            del self._blocked[thread]
            self._impatient.discard(thread)

    @property
    def driven(self) -> bool:
        """Whether some caller waits, and so drives the engine."""
        return bool(self._blocked)

    def _blocking(self) -> Operation[Any] | None:
        """The operation this rank is blocked in, if nothing else can be submitted meanwhile."""
        callers = sum(thread.is_alive() for thread in list(self._callers))
        blocked = list(self._blocked.values())
        if self._impatient or not len(blocked) == callers == 1 or blocked[0].finished.is_set():
            return None
        return blocked[0]

    # what the peers do

    def hear(self, peer: int, message: Message) -> Operation[Any] | None:
        """Take a message that is not about an exchange; gives an operation that it has ended.

        Raises:
            ValueError: It names a rank that there is not.
        """
        if isinstance(message, (Probe, Circle)):
            ranks = [link.rank for link in message.chain]
            if not all(0 <= rank < self._size for rank in ranks):
                raise ValueError(f"a chain of ranks {ranks}, where there are {self._size} ranks")
        if isinstance(message, Leave):
            self._gone[peer] = _Gone(message.reason, message.joined, time.monotonic())
        elif isinstance(message, Probe):
            return self._answer(message)
        elif isinstance(message, Circle):
            return self._told(message.chain)
        return None

    def lose(self, peer: int, reason: str) -> None:
        """A peer is gone: whatever needs it fails, once what it has sent before is taken."""
        self._gone[peer] = _Gone(reason, {}, time.monotonic(), failed=True)

    def done(self, peer: int) -> bool:
        """Whether a rank has said that it leaves, without having failed."""
        gone = self._gone.get(peer)
        return gone is not None and not gone.failed

    def distrust(self, peer: int, error: Exception, *, tell_next_verb: bool) -> None:
        """A peer has sent what cannot be read: whatever needs it fails."""
        problem = (
            f"rank {self._rank}: a message of rank {peer} cannot be read "
            f"({type(error).__name__}: {error}); run the same version of asyncddp on all ranks"
        )
        known = self._unreadable.setdefault(peer, PeerError(problem))
        if tell_next_verb:
            self._mailbox.complain(known)

    def _distrusted(self, peers: Iterable[int]) -> PeerError | None:
        """The error about those of some peers whose messages cannot be read."""
        known = next((self._unreadable[peer] for peer in peers if peer in self._unreadable), None)
        if known is None:
            return None
        self._mailbox.channels.told(known)
        return PeerError(str(known))

    def patience(self, what: str) -> Callable[[list[int]], None]:
        """Begin to wait for what peers do of themselves.

        Args:
            what: What is waited for.

        Returns:
            A function to call, again and again, with the peers that have yet to do it. It raises
            PeerLeftError when one of them has left and WaitTimeoutError after the deadline.
        """
        since, config, warned = time.monotonic(), self._config, False

        def go_on(peers: list[int]) -> None:
            """Look whether a peer has left, or the deadline has passed."""
            nonlocal warned
            now = time.monotonic()
            unreadable = self._distrusted(peers)
            if unreadable is not None:
                raise unreadable
            for peer in peers:
                gone = self._gone.get(peer)
                if gone is not None and now - gone.since > _GRACE:
                    raise _left(f"rank {self._rank}: {what}", peer, gone)
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

        return go_on

    def forgive(self) -> None:
        """All that had left are back."""
        self._gone.clear()

    def _answer(self, probe: Probe) -> Operation[Any] | None:
        asking = probe.chain[-1]
        self._mailbox.object_to(asking.rank, asking.key)
        self._note_waiting(asking.rank, asking.key)
        operation = self._blocking()
        if operation is None:
            return None
        missing, verb = operation.missing(), operation.program.verb
        onward, circle = deadlock.extend(probe, self._rank, verb, missing, self._submitted)
        for peer, longer in onward:
            self._mailbox.put(peer, longer)
        if circle is None:
            return None
        for link in circle[1:]:
            self._mailbox.put(link.rank, Circle(circle))
        return self._give_up(operation, circle)

    def _told(self, circle: tuple[Waiting, ...]) -> Operation[Any] | None:
        """A peer has found a circle with this rank in it."""
        operation = self._blocking()
        place = [link.rank for link in circle].index(self._rank)
        if operation is None or circle[place].key not in [key for _, key in operation.missing()]:
            return None
        return self._give_up(operation, (*circle[place:], *circle[:place]))

    def _give_up(self, operation: Operation[Any], circle: tuple[Waiting, ...]) -> Operation[Any]:
        operation.fail(
            DeadlockError(
                f"{self.me(operation)} can never end: {deadlock.describe(circle)}. Call the same "
                "verbs with the same names and neighbours on all of these ranks; "
                f"{self.holdup(operation)}"
            )
        )
        return operation

    # what is waited for

    def look(self, operation: Operation[Any]) -> None:
        """Fail an operation that can or shall no longer wait; warn; ask the peers."""
        now = time.monotonic()
        waited = now - operation.started
        if self._unreadable:
            unreadable = self._distrusted(peer for peer, _ in operation.missing())
            if unreadable is not None:
                operation.fail(unreadable)
                return
        lost = self._lost(operation, now) if self._gone else None
        if lost is not None:
            operation.fail(_left(self.me(operation), lost, self._gone[lost]))
        elif now > operation.deadline:
            operation.fail(
                WaitTimeoutError(
                    f"{self.me(operation)} was not done in {waited:.1f} s "
                    f"(ASYNCDDP_TIMEOUT={self._config.timeout:g}); {self.holdup(operation)}"
                )
            )
        elif waited > self._config.warn_after and not operation.warned:
            operation.warned = True
            self._warn(operation, waited)
        if now > operation.next_probe and self._blocking() is operation:
            operation.next_probe = now + min(10.0, max(_PROBE_AFTER, waited))
            missing, verb = operation.missing(), operation.program.verb
            for peer, probe in deadlock.started(self._rank, verb, missing):
                self._mailbox.put(peer, probe)

    def _note_waiting(self, peer: int, key: Key) -> None:
        """Remember who waits in the newest collective of each kind: its ranks tell one another."""
        if key.collective:
            step, ranks = self._waiting.get(key.base, (-1, {}))
            if key.step >= step:
                ranks = ranks if key.step == step else {}
                ranks.setdefault(peer, time.monotonic())
                self._waiting[key.base] = key.step, ranks

    def _waiting_too(self, operation: Operation[Any]) -> Mapping[int, float]:
        """Other ranks that are known to wait in the same collective, and since when."""
        step, ranks = self._waiting.get(operation.key.base, (-1, {}))
        return ranks if step == operation.key.step else {}

    def _warn(self, operation: Operation[Any], waited: float) -> None:
        """Warn that this rank waits; of several in one collective only the lowest does so."""
        others = self._waiting_too(operation)
        recent = operation.started + self._config.warn_after / 2
        if any(peer < self._rank and since < recent for peer, since in others.items()):
            return
        late = {peer for peer, _ in operation.missing()}.difference(others)
        if others and late:
            logger.warning(
                "%d ranks (%s) wait for %s, in %s, since %.0f s",
                len(others) + 1,
                list_ranks([self._rank, *others]).partition(" ")[2],
                list_ranks(late),
                operation.describe(),
                waited,
            )
            return
        me, holdup = self.me(operation), self.holdup(operation)
        logger.warning("%s has been waiting for %.0f s; %s", me, waited, holdup)

    def _lost(self, operation: Operation[Any], now: float) -> int | None:
        """Which of the peers that an operation waits for will never come."""
        for peer, key in operation.missing():
            gone = self._gone.get(peer)
            if gone is None or now - gone.since < _GRACE:
                continue
            if key.step >= gone.joined.get(key.base, 0):
                return peer
        return None

    def me(self, operation: Operation[Any]) -> str:
        """This rank and what it does, for messages."""
        return f"rank {self._rank}: {operation.describe()}"

    def holdup(self, operation: Operation[Any]) -> str:
        """Which peers are missing, and what they have sent instead."""
        peers = sorted({peer for peer, _ in operation.missing()})
        peers = [peer for peer in peers if peer not in self._waiting_too(operation)] or peers
        if not peers:
            return "it waits for its own turn"
        text = f"missing: {list_ranks(peers)}"
        for peer in peers:
            for data in self._mailbox.unmatched(peer)[:3]:
                text += f"; rank {peer} has sent {data.verb} {data.key} instead"
        return text


def _left(me: str, peer: int, gone: _Gone) -> PeerLeftError:
    """The error of a rank that needs one that has left, and what it may come from."""
    advice = ""
    if not gone.reason.startswith(_RAISED):
        advice = (
            "; if ranks have different numbers of batches, put the training loop inside "
            "`with bf.join(optimizer):`"
        )
    error = PeerLeftError(f"{me}: rank {peer} has left ({gone.reason}), but is needed{advice}")
    error.origin = peer
    return error
