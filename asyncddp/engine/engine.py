"""The engine of one rank: takes programs, drives them, keeps every wait bounded."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from typing import Any, TypeVar

from asyncddp.config import Config
from asyncddp.engine.desk import Desk
from asyncddp.engine.handle import Handle
from asyncddp.engine.mailbox import Mailbox
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE, Key, Leave
from asyncddp.engine.operation import Operation, Program
from asyncddp.engine.watch import Watch
from asyncddp.engine.worker import Worker
from asyncddp.errors import NotInitializedError, WaitTimeoutError
from asyncddp.transport.contract import Transport

__all__ = ["Engine"]

R = TypeVar("R")


class Engine:
    """Drives the verbs of one rank over one transport.

    A blocking verb is driven by the thread that calls it; a worker thread drives what is under way
    while no caller does. Whoever drives holds the lock for one round of progress at a time.

    Args:
        transport: The wire.
        config: Deadlines and the check mode.
    """

    def __init__(self, transport: Transport, config: Config) -> None:
        self.transport, self.config = transport, config
        self.mailbox = Mailbox(transport)
        self._lock = threading.RLock()  # held for one round of progress
        self._door = threading.Lock()  # held to enter, so that callers never wait for a round
        self._queue: deque[Operation[Any]] = deque()
        self._active: list[Operation[Any]] = []
        self._uses: dict[str, int] = defaultdict(int)
        self._turns: dict[tuple[str, str], int] = defaultdict(int)
        self._watch = Watch(config, self.mailbox, self._submitted)
        self.closed = False
        self._worker = Worker(self, transport) if transport.size > 1 and transport.threads else None

    # submitting

    def submit(self, program: Program[R]) -> Handle[R]:
        """Queue a program; the worker starts it."""
        operation = self._enter(program)
        if self._worker is not None:
            self._worker.wake()
        self.nudge()
        return Handle(self, operation)

    def run(self, program: Program[R]) -> R:
        """Run a program on the calling thread and give its result."""
        return Handle(self, self._enter(program)).wait()

    def _enter(self, program: Program[R]) -> Operation[R]:
        self._watch.entered()
        with self._door:
            if self.closed:
                raise NotInitializedError(
                    f"{program.verb}: called after shutdown(); call init() first"
                )
            if self.mailbox.late is not None:
                error, self.mailbox.late = self.mailbox.late, None
                raise error
            label = program.name or f"{program.verb}.noname"
            name = label
            if program.ordered:
                name = MACHINE_COLLECTIVE if program.local else COLLECTIVE
            key, turn = Key(name, self._uses[name]), self._turns[program.verb, label]
            self._uses[name] += 1
            self._turns[program.verb, label] += 1
            check = program.check or self.config.check
            desk = Desk(self.mailbox, program.verb, key, turn, check=check)
            operation = Operation(program, desk, self.config.timeout)
            self._queue.append(operation)
        return operation

    # driving

    def drive(self, operation: Operation[Any], timeout: float | None = None) -> None:
        """Make progress on the calling thread until an operation has ended.

        Raises:
            WaitTimeoutError: ``timeout`` seconds have passed.
        """
        if operation.finished.is_set():
            return
        limit = None if timeout is None else time.monotonic() + timeout
        attempt = 0
        with self._watch.blocked(operation, forever=limit is None):
            while not operation.finished.is_set():
                if limit is not None and time.monotonic() > limit:
                    raise WaitTimeoutError(
                        f"{self._watch.me(operation)} was not done in {timeout:g} s; "
                        f"{self._watch.holdup(operation)}"
                    )
                attempt = 0 if self.progress() else attempt + 1
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
        return bool(self._queue or self._active)

    def progress(self) -> bool:
        """One round: take what has come, go on where possible; whether anything moved."""
        with self._lock:
            if self.closed:
                return False
            moved = False
            for peer, bundle in self.transport.poll():
                moved = True
                for message in self.mailbox.receive(peer, bundle):
                    ended = self._watch.hear(peer, message)
                    if ended is not None:
                        self._active.remove(ended)
            while self._queue:
                self._active.append(self._queue.popleft())
                moved = True
            moved = self._advance() or moved
            return self.mailbox.flush() or moved

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

    def lose(self, peer: int, reason: str) -> None:
        """A peer is gone: whatever needs it fails, once what it has sent before is taken."""
        self._watch.lose(peer, reason)

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
            self.progress()
            for operation in (*self._active, *list(self._queue)):
                operation.fail(
                    NotInitializedError(f"{operation.describe()}: shut down before its end")
                )
            self.leave(reason)
            self.closed = True
        if self.mailbox.late is not None:
            raise self.mailbox.late
