"""The engine of one rank: takes programs, drives them, keeps every wait bounded."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from asyncddp.config import Config
from asyncddp.engine.desk import Desk
from asyncddp.engine.handle import Handle
from asyncddp.engine.mailbox import Mailbox
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE, UNREADABLE, Key, Leave
from asyncddp.engine.operation import Operation, Program
from asyncddp.engine.parcels import Parcels
from asyncddp.engine.recorded import Awaited, call_of
from asyncddp.engine.watch import Watch
from asyncddp.engine.worker import Worker
from asyncddp.errors import (
    ArgumentError,
    AsyncDDPError,
    NotInitializedError,
    PeerError,
    WaitTimeoutError,
)
from asyncddp.timeline.ranges import profiled
from asyncddp.timeline.recorder import Recorder
from asyncddp.transport.contract import Transport

__all__ = ["Engine", "Turn"]

R = TypeVar("R")

_STALE = 0.02  # seconds
_LISTEN = 0.05  # seconds
_LOOK = 256  # rounds without progress after which to look around
_FORKED = "this process was forked from"
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: no engine is this process's own."""
    for engine in list(_ENGINES):
        engine.forked_here()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Turn(NamedTuple):
    """Where one use of a name stands.

    Attributes:
        key: What it is called on all ranks.
        rounds: How often its verb was used under that name before: the round of a schedule.
    """

    key: Key
    rounds: int


class Engine:
    """Drives the verbs of one rank over one transport.

    A blocking verb is driven by the thread that calls it; a worker thread drives what is under way
    while no caller does. Whoever drives holds the lock for one round of progress at a time.

    Args:
        transport: The wire.
        config: Deadlines and the check mode.
        recorder: Takes notes for the timeline, if there is one.
    """

    def __init__(
        self, transport: Transport, config: Config, recorder: Recorder | None = None
    ) -> None:
        self.transport, self.config, self.recorder = transport, config, recorder
        self._uses: dict[str, int] = defaultdict(int)
        self.mailbox = Mailbox(transport, self._uses, recorder)
        self._lock = threading.RLock()  # held for one round of progress
        self._door = threading.Lock()  # held to enter, so that callers never wait for a round
        self._queue: deque[Operation[Any]] = deque()
        self._active: list[Operation[Any]] = []
        self._turns: dict[tuple[str, str], int] = defaultdict(int)
        self._watch = Watch(config, self.mailbox, self._submitted)
        self.shortcuts: dict[Any, Any] = {}
        """Short ways of verbs; the verbs know what is in it."""
        self.lent: dict[int, Any] = {}
        """Handles that nobody drives; when nobody asks for one it is handed over to the engine."""
        self._errands: deque[Callable[[], bool]] = deque()
        self.pause = _LISTEN
        """Seconds between looks at the wire while nothing is under way."""
        self._next_look = 0.0
        self._latest = 0  # the thread that entered last
        self.closed = False
        self._closed_because = "called after shutdown(); call init() first"
        self._given_up: str | None = None
        self._worker = Worker(self, transport) if transport.size > 1 and transport.threads else None
        _ENGINES.add(self)

    # submitting

    def submit(
        self, program: Program[R], turn: Turn | None = None, about: Sequence[object] = ()
    ) -> Handle[R]:
        """Queue a program; the worker starts it. The arguments are as for :meth:`run`."""
        if (self.recorder is None and not profiled()) or turn is not None:
            return self._submit(program, turn)
        with call_of(self.recorder, program.verb, program.label, about):
            return self._submit(program, None)

    def _submit(self, program: Program[R], turn: Turn | None) -> Handle[R]:
        operation = self._enter(program, turn)
        if self._worker is not None:
            self._worker.wake()
        self.nudge()
        return Handle(self, operation)

    def run(self, program: Program[R], turn: Turn | None = None, about: Sequence[object] = ()) -> R:
        """Run a program on the calling thread and give its result.

        Args:
            program: What to run.
            turn: Where it stands among the uses of its name, if :meth:`enter` has said so already.
            about: What the verb was called with, for the timeline.
        """
        if (self.recorder is None and not profiled()) or turn is not None:
            return Handle(self, self._enter(program, turn)).wait()
        with call_of(self.recorder, program.verb, program.label, about):
            return Handle(self, self._enter(program, None)).wait()

    def _enter(self, program: Program[R], turn: Turn | None = None) -> Operation[R]:
        if not program.counted.isascii():
            _check_name(program.verb, program.counted)
        with self._door:
            if turn is None:
                step, rounds = self._count(program.verb, program.label, program.counted)
                turn = Turn(Key(program.counted, step), rounds)
            check = program.check or self.config.check
            desk = Desk(self.mailbox, program.verb, *turn, check=check)
            operation = Operation(program, desk, self.config.timeout)
            self._queue.append(operation)
        return operation

    def enter(self, verb: str, name: str, flight: deque[int]) -> int | None:
        """Count a use of a name, for a verb that begins without the engine.

        Args:
            verb: The verb.
            name: The name.
            flight: Where its step is added.

        Returns:
            The step, or None where something is under way, before which it must not begin.

        Raises:
            NotInitializedError: After the end.
            PeerError: A peer has refused something that had already counted as done here.
        """
        with self._door:
            if (self._queue or self._active) and self._has(name):
                return None
            if self.mailbox.refuses(name):
                return None
            step = self._count(verb, name, name)[0]
            flight.append(step)
            return step

    def _has(self, name: str) -> bool:
        """Whether a use of a name is under way."""
        every = (*list(self._active), *list(self._queue), *list(self._active))
        return any(operation.key.name == name for operation in every)

    def uses(self, name: str) -> int:
        """How often a name was used: its next step."""
        return self._uses[name]

    def rounds(self, verb: str, name: str) -> int:
        """How often a verb was used under a name."""
        return self._turns[verb, name]

    def _count(self, verb: str, label: str, name: str) -> tuple[int, int]:
        """Count a use of a name: its step, and the verb's earlier uses of it."""
        thread = threading.get_ident()
        if thread != self._latest:
            self._watch.entered()
            self._latest = thread
        if self._given_up is not None:
            raise PeerError(f"rank {self.transport.rank}: {verb}: {self._given_up}")
        if self.closed:
            self.insist(verb)
        error = self.mailbox.late
        if error is not None:
            self.mailbox.channels.told(error)
            raise error
        step, rounds = self._uses[name], self._turns[verb, label]
        self._uses[name] = step + 1
        self._turns[verb, label] = rounds + 1
        return step, rounds

    def insist(self, what: str) -> None:
        """Refuse to begin something after the end, or in a process that was forked meanwhile.

        Args:
            what: What was called, for the message.

        Raises:
            NotInitializedError: After the end, or in a forked process.
        """
        if self.closed:
            raise NotInitializedError(f"{what}: {self._closed_because}")

    # one-sided

    @contextmanager
    def parcels(self) -> Iterator[Parcels]:
        """What is sent to services and taken for them, while no round is made; flushed at the end.

        Raises:
            NotInitializedError: After the end.
        """
        with self._lock:
            if self.closed:
                raise NotInitializedError(self._closed_because)
            yield self.mailbox.parcels
            self.mailbox.flush()

    def errand(self, attempt: Callable[[], bool]) -> None:
        """Have something attempted in every round of progress until it says that it is over.

        Args:
            attempt: It neither raises nor waits, also not for a lock whose owner may wait for the
                engine.
        """
        self._errands.append(attempt)
        if self._worker is not None:
            self._worker.wake()

    def patience(self, what: str) -> Callable[[list[int]], None]:
        """Begin to wait for what peers do of themselves, by :meth:`Watch.patience`."""
        return self._watch.patience(what)

    def attend(self, done: Callable[[], bool], what: str, peers: Callable[[], list[int]]) -> None:
        """Wait for what peers do of themselves, without a program.

        Args:
            done: Whether it has happened.
            what: What is waited for, for messages.
            peers: Those who have yet to do it.

        Raises:
            NotInitializedError: After the end.
            PeerLeftError: One of them has left.
            WaitTimeoutError: The deadline has passed.
        """
        attempt, patience = 0, self.patience(what)
        while not done():
            self.insist(what)
            patience(peers())
            attempt = 0 if self.progress() else attempt + 1
            self.transport.rest(attempt)

    # driving

    def drive(self, operation: Operation[Any], timeout: float | None = None) -> None:
        """Make progress on the calling thread until an operation has ended.

        Raises:
            WaitTimeoutError: ``timeout`` seconds have passed.
        """
        if operation.finished.is_set():
            return
        if self.recorder is None:
            self._drive(operation, timeout, self.progress)
            return
        awaited = Awaited(self.recorder, operation, self.progress)
        try:
            self._drive(operation, timeout, awaited.progress)
        finally:
            awaited.end()

    def _drive(
        self, operation: Operation[Any], timeout: float | None, progress: Callable[[], bool]
    ) -> None:
        limit = None if timeout is None else time.monotonic() + timeout
        attempt = 0
        with self._watch.blocked(operation, forever=limit is None):
            while not operation.finished.is_set():
                if limit is not None and time.monotonic() > limit:
                    raise WaitTimeoutError(
                        f"{self._watch.me(operation)} was not done in {timeout:g} s; "
                        f"{self._watch.holdup(operation)}"
                    )
                attempt = 0 if progress() else attempt + 1
                if attempt % _LOOK == _LOOK - 1:
                    self.listen()
                if not operation.finished.is_set():
                    self.transport.rest(attempt)

    def nudge(self) -> None:
        """Make one round of progress where no worker does."""
        if self._worker is None:
            self.progress()

    @property
    def driven(self) -> bool:
        """Whether a caller is driving, so that the worker need not."""
        return self._watch.driven

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        waiting = self._queue or self._active or self._errands
        return bool(waiting) or self.mailbox.parcels.busy

    def listen(self) -> bool:
        """One round, and a look at what neighbours show that nobody here expects."""
        with self._lock:
            now = time.monotonic()
            if not self.closed and now >= self._next_look:
                self.mailbox.look_around()
                self._next_look = now + 50 * (time.monotonic() - now)  # 2 % of the time at most
            if not self.closed:
                self._reclaim(_STALE)
            return self.progress()

    def _reclaim(self, age: float) -> None:
        """Take over what was lent out and not been asked for in so many seconds."""
        oldest = time.monotonic() - age
        for handle in list(self.lent.values()):
            if handle.since <= oldest:
                handle.hand_over()

    def progress(self) -> bool:
        """One round: take what has come, go on where possible; whether anything moved."""
        with self._lock:
            if self.closed:
                return False
            moved = False
            for peer, bundle in self.transport.poll():
                moved = True
                self._take(peer, bundle)
            while self._queue:
                self._active.append(self._queue[0])  # first, so that it is always in one of them
                self._queue.popleft()
                moved = True
            moved = self._advance() or moved
            moved = (bool(self._errands) and self._run_errands()) or moved
            moved = self.mailbox.parcels.progress() or moved
            return self.mailbox.flush() or moved

    def _take(self, peer: int, bundle: bytes) -> None:
        """Take what a peer has sent; what cannot be read fails whatever needs that peer."""
        try:
            for message in self.mailbox.receive(peer, bundle):
                ended = self._watch.hear(peer, message)
                if ended is not None:
                    self._active.remove(ended)
        except AsyncDDPError:
            raise
        except UNREADABLE as error:
            waiting = [operation.missing() for operation in self._active]
            told = any(peer == other for missing in waiting for other, _ in missing)
            self._watch.distrust(peer, error, tell_next_verb=not told)

    def _advance(self) -> bool:
        """Advance all that may go on; of the ordered programs only the first."""
        ended, ordered = False, False
        for operation in list(self._active):
            if operation.program.ordered:
                if ordered:
                    continue
                ordered = not operation.advance()
            else:
                operation.advance()
            if not operation.finished.is_set():
                self._watch.look(operation)
            if operation.finished.is_set():
                self._active.remove(operation)
                ended = True
        return ended

    def _run_errands(self) -> bool:
        """Attempt what is to be attempted; whether any of it is over."""
        over = [attempt for attempt in list(self._errands) if attempt()]
        for attempt in over:
            self._errands.remove(attempt)
        return bool(over)

    def _submitted(self, key: Key) -> bool:
        return self.mailbox.knows(key) or any(
            operation.key == key for operation in (*list(self._queue), *self._active)
        )

    # ending

    def leave(self, reason: str) -> None:
        """Tell the peers that nothing more will be submitted here, so that nobody waits for it."""
        with self._lock:
            self.progress()
            joined = {name: self._uses[name] for name in (COLLECTIVE, MACHINE_COLLECTIVE)}
            for peer in range(self.transport.size):
                if peer != self.transport.rank:
                    self.mailbox.put(peer, Leave(reason, joined))
            self.mailbox.flush()

    def resume(self) -> None:
        """All ranks go on after :meth:`leave`; called while none of them submits anything."""
        with self._lock:
            self.progress()
            self._watch.forgive()

    def has_left(self, peer: int) -> bool:
        """Whether a peer has said that it leaves the world, without having failed."""
        return self._watch.done(peer)

    def lose(self, peer: int, reason: str) -> None:
        """A peer is gone: whatever needs it fails, once what it has sent before is taken."""
        self._watch.lose(peer, reason)

    def counts(self) -> dict[str, int]:
        """How often each name was used; ranks whose counts are equal are in step."""
        return {name: count for name, count in self._uses.items() if count}

    def give_up(self, reason: str) -> None:
        """Fail what is under way, and every verb that comes, for a reason; only the end is left."""
        with self._lock:
            self._given_up = reason
            error = PeerError(f"rank {self.transport.rank}: {reason}")
            for operation in (*self._active, *list(self._queue)):
                operation.fail(error)
            self._active.clear()
            self._queue.clear()

    @property
    def forked(self) -> bool:
        """Whether this process is not the one that made the engine, but a fork of it."""
        return self._closed_because.startswith(_FORKED)

    def forked_here(self) -> None:
        """Leave the rank to the parent: this process is a fork of it, and has no threads but one.

        Nothing is sent. What was under way ends with an error, as does every verb that comes; locks
        that another thread may have held at the fork are made anew.
        """
        rank, self._worker, self.closed = self.transport.rank, None, True
        self._lock, self._door = threading.RLock(), threading.Lock()
        self._closed_because = (
            f"{_FORKED} rank {rank} (process {os.getppid()}), which alone may communicate. Call "
            "verbs in the process that called init(), or start this one with "
            'multiprocessing.get_context("spawn")'
        )
        for operation in (*self._active, *self._queue):
            operation.forget(NotInitializedError(f"{operation.describe()}: {self._closed_because}"))
        self._active, self._queue = [], deque()
        for handle in list(self.lent.values()):
            handle.forget(NotInitializedError(f"{handle!r}: {self._closed_because}"))
        self.lent.clear()
        self._errands.clear()

    def close(self, reason: str) -> None:
        """Tell the peers that this rank leaves, fail what is under way, stop the worker.

        Raises:
            PeerError: A peer has refused something that had already counted as done here.
        """
        if self._worker is not None:
            self._worker.stop()
        with self._lock:
            if self.closed:
                return
            self._reclaim(0.0)
            self.progress()
            for operation in (*self._active, *list(self._queue)):
                operation.fail(
                    NotInitializedError(f"{operation.describe()}: shut down before its end")
                )
            self.leave(reason)
            self.mailbox.parcels.close()
            self._errands.clear()
            self.closed = True
        if self.mailbox.late is not None:
            raise self.mailbox.late


def _check_name(verb: str, name: str) -> None:
    """Refuse a name that messages cannot carry."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{verb}: argument name: expected a text that UTF-8 can encode, got {name!r}"
        ) from error
