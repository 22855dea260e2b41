"""Group of ranks that are threads of one process, with their shared messages and collectives."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from asyncddp.errors import MismatchError
from asyncddp.shm.arena import InProcessArena
from asyncddp.transport.base import SHORT_BYTES, ExitRecord, SharedMemoryGroup
from asyncddp.transport.thread_signal import ThreadSignal, ThreadWakeQueue, set_signals

CollectiveFunction: TypeAlias = Callable[[list[Any]], list[Any] | None]
"""Makes what ranks get of what each has entered with, or writes it where they have said."""
_MessageKey: TypeAlias = tuple[int, int, int]  # source, target and tag


class ThreadRankRequest:
    """Send, receive or collective between ranks that are threads of one process."""

    def __init__(self) -> None:
        self.value: Any = None
        self._ended = self.abandoned = False
        self._error: Exception | None = None

    def complete(self, value: Any = None) -> None:
        """Complete the request, with this rank's result of a collective."""
        self.value, self._ended = value, True

    def fail(self, error: Exception) -> None:
        """Make :meth:`done` raise an error."""
        self._error = error

    def done(self) -> bool:
        """Tell whether the request has completed; raise its error if it failed."""
        if self._error is not None:
            raise self._error
        return self._ended

    def abandon(self) -> None:
        """Give up waiting: a message that arrives later is not delivered."""
        self.abandoned = True


class _ThreadRankCollective(ThreadRankRequest):
    """Collective of ranks that are threads: the inputs of the ranks that have entered."""

    def __init__(self, size: int, entered: Mapping[int, object]) -> None:
        super().__init__()
        self._size, self._entered = size, entered

    def late_ranks(self) -> list[int]:
        """Return the ranks that have not entered."""
        return [rank for rank in range(self._size) if rank not in self._entered]


class ThreadGroup:
    """State shared by ranks that are threads: inboxes, unmatched messages, open collectives."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.wake_queue = ThreadWakeQueue()
        self.signals = [ThreadSignal(self.wake_queue) for _ in range(size)]
        self.inboxes: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.sends: dict[_MessageKey, deque[tuple[torch.Tensor, ThreadRankRequest]]] = {}
        self.receives: dict[_MessageKey, deque[tuple[torch.Tensor, ThreadRankRequest]]] = {}
        self.collectives: dict[int, dict[int, tuple[str, Any, ThreadRankRequest]]] = {}
        self.parts: dict[tuple[tuple[int, ...], int], tuple[ThreadGroup, set[int]]] = {}
        self.numbers = [itertools.count() for _ in range(size)]  # of each rank's collectives
        self.exit_records: dict[int, ExitRecord] = {}
        self.size = size
        processes = dict.fromkeys(range(size), os.getpid())
        self.window_group = SharedMemoryGroup(
            InProcessArena(), processes, self._notify, SHORT_BYTES
        )

    def _notify(self, rank: int) -> None:
        self.signals[rank].set()

    def form_part(self, ranks: tuple[int, ...], tag: int, rank: int) -> ThreadGroup:
        """Return the state of a subgroup requested by all its ranks; the first one creates it."""
        with self.lock:
            if (ranks, tag) not in self.parts:
                self.parts[ranks, tag] = ThreadGroup(len(ranks)), set()
            made, came = self.parts[ranks, tag]
            came.add(rank)
            if len(came) == len(ranks):  # the next call makes another part
                del self.parts[ranks, tag]
            return made

    def match_message(
        self, data: torch.Tensor, source: int, target: int, tag: int, *, sends: bool
    ) -> ThreadRankRequest:
        """Match a send with its receive; the later of the two calls copies the data."""
        mine, theirs = (self.sends, self.receives) if sends else (self.receives, self.sends)
        key, request = (source, target, tag), ThreadRankRequest()
        with self.lock:
            waiting = theirs.get(key)
            while waiting and waiting[0][1].abandoned:
                waiting.popleft()
            if not waiting:
                mine.setdefault(key, deque()).append((data, request))
                return request
            other, partner = waiting.popleft()
            if not waiting:
                del theirs[key]
        to, given = (other, data) if sends else (data, other)
        if to.numel() == given.numel():
            to.copy_(given)
            partner.complete()
            request.complete()
        else:
            sizes = f"{given.numel()} bytes to rank {target}, which expected {to.numel()}"
            error = MismatchError(f"rank {source} sent {sizes}")
            partner.fail(error)
            request.fail(error)
        self.signals[target if sends else source].set()
        return request

    def enter_collective(
        self, rank: int, kind: str, value: Any, compute: CollectiveFunction
    ) -> ThreadRankRequest:
        """Enter a rank's next collective; the last rank to enter computes the result for all."""
        number = next(self.numbers[rank])
        with self.lock:
            entered = self.collectives.setdefault(number, {})
            request = _ThreadRankCollective(self.size, entered)
            entered[rank] = (kind, value, request)
            if len(entered) < self.size:
                return request
            del self.collectives[number]
        kinds, values, requests = zip(*(entered[r] for r in range(self.size)), strict=True)
        try:
            if len(set(kinds)) > 1:
                raise MismatchError(f"ranks met in different collectives: {sorted(set(kinds))}")
            results = compute(list(values)) or values
        except (MismatchError, RuntimeError) as error:
            for waiting in requests:
                waiting.fail(MismatchError(str(error)))
        else:
            for waiting, result in zip(requests, results, strict=True):
                waiting.complete(result)
        set_signals(self.signals, self.wake_queue)
        return request
