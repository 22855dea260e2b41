"""Distributed mutex of a window: one lock for each pair of neighbours, acquired by messages.

Rank h owns one lock, a *slot*, for each in-neighbour w. Either of the ranks h and w may hold slot
(h, w), and then excludes the other; two writers to one rank do not exclude each other. The engine
of rank h grants its slots, which w requests by message. Threads of one rank exclude each other as
well; a thread that holds a slot may acquire it again.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from asyncddp.engine import ProgressEngine
from asyncddp.errors import WaitTimeoutError

LOCK, LOCKED, FREE = "lock", "locked", "free"


class _LockRequest(NamedTuple):
    """Request of a rank for a lock, numbered by a ticket."""

    rank: int
    ticket: int


class _ReentrantThreadLock:
    """Reentrant lock that lets only one thread of this rank at a time hold a distributed lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = self.ticket = 0


class WindowMutex:
    """Mutex of a window: grants this rank's locks, and acquires other ranks' locks by message.

    The engine's lock guards the slots. A message is one of three words, and a ticket.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        rank: int,
        send_message: Callable[[int, str, int], None],
        require_open: Callable[[], None],
        what: str,
    ) -> None:
        self._engine, self._rank, self._send_message, self._what = engine, rank, send_message, what
        self._require_open = require_open
        # by in-neighbour, the requests for its slot, of which the first one holds it
        self._slots: defaultdict[int, deque[_LockRequest]] = defaultdict(deque)
        self._guards: dict[tuple[int, int], _ReentrantThreadLock] = {}
        self._tickets = itertools.count(1)
        self._granted: dict[int, bool] = {}  # this rank's tickets that are out

    @contextmanager
    def holding(self, holders: Iterable[int], writers: Iterable[int]) -> Iterator[None]:
        """Hold locks for this thread: all or none, acquired in the same order on all ranks.

        These are this rank's locks at ``holders``, and its own locks for ``writers``.
        """
        pairs = {*((holder, self._rank) for holder in holders), *((self._rank, w) for w in writers)}
        with ExitStack() as taken:
            for pair in sorted(pairs):
                self._lock(pair)
                taken.callback(self._unlock, pair)
            yield

    def handle_message(self, peer: int, word: str, ticket: int) -> None:
        """Handle a peer's message: a lock request, a release, or a grant to this rank."""
        if word == LOCKED:
            if ticket in self._granted:
                self._granted[ticket] = True
        elif word == LOCK:
            self._request_slot(peer, _LockRequest(peer, ticket))
        else:
            self._free_slot(peer, _LockRequest(peer, ticket))

    def _lock(self, pair: tuple[int, int]) -> None:
        guard = self._guards.setdefault(pair, _ReentrantThreadLock())
        limit = self._engine.config.timeout
        if not guard.lock.acquire(timeout=min(limit, threading.TIMEOUT_MAX)):
            raise WaitTimeoutError(
                f"rank {self._rank}: {self._what} was not free in {limit:g} s "
                f"(ASYNCDDP_TIMEOUT={limit:g}); another thread of this rank holds it"
            )
        with ExitStack() as undo:
            undo.callback(guard.lock.release)
            if guard.depth == 0:
                guard.ticket = self._acquire_slot(*pair)
            guard.depth += 1
            undo.pop_all()

    def _unlock(self, pair: tuple[int, int]) -> None:
        guard = self._guards[pair]
        guard.depth -= 1
        try:
            if guard.depth == 0:
                self._release_slot(*pair, guard.ticket)
        finally:
            guard.lock.release()

    def _acquire_slot(self, holder: int, writer: int) -> int:
        """Request a lock, and wait until it is granted; return the ticket."""
        ticket = next(self._tickets)
        self._granted[ticket] = False
        if holder == self._rank:
            other, what = writer, f"{self._what} for rank {writer}"
            with self._engine.active_messages():
                self._request_slot(writer, _LockRequest(self._rank, ticket))
        else:
            other, what = holder, f"{self._what} at rank {holder}"
            self._send_message(holder, LOCK, ticket)
        if self._granted[ticket]:
            return ticket

        def granted() -> bool:
            self._require_open()
            return self._granted[ticket]

        try:
            self._engine.wait_until(granted, what, lambda: [other])
        except BaseException:
            self._release_slot(holder, writer, ticket)
            raise
        return ticket

    def _release_slot(self, holder: int, writer: int, ticket: int) -> None:
        self._granted.pop(ticket, None)
        if holder == self._rank:
            with self._engine.active_messages():
                self._free_slot(writer, _LockRequest(self._rank, ticket))
        else:
            self._send_message(holder, FREE, ticket)

    # the slots of this rank, under the engine's lock

    def _request_slot(self, writer: int, request: _LockRequest) -> None:
        requests = self._slots[writer]
        requests.append(request)
        if len(requests) == 1:
            self._grant(request)

    def _grant(self, request: _LockRequest) -> None:
        if request.rank == self._rank:
            self._granted[request.ticket] = True
        else:
            self._send_message(request.rank, LOCKED, request.ticket)

    def _free_slot(self, writer: int, request: _LockRequest) -> None:
        requests = self._slots[writer]
        if request in requests:
            held = requests[0] == request
            requests.remove(request)
            if held and requests:
                self._grant(requests[0])
