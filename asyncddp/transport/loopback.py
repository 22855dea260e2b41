"""Loopback transport for ranks that are threads of one process, with messages in its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from asyncddp.errors import MismatchError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.means import sum_of
from asyncddp.transport.base import Request, Scope, SharedMemoryGroup, Transport
from asyncddp.transport.startup_deadline import StartupDeadline
from asyncddp.transport.thread_group import ThreadGroup

_PAUSES = 0.0005, 0.005  # seconds of the first and the longest sleep between polls of few ranks
_BRIEF = 0.02  # seconds that a rank waits for a neighbour before its engine does
_POLLS_PER_SECOND = 3000  # of all ranks together at most, while nothing wakes them
_RANKS_POLLED_PER_SECOND = 500_000  # that they look at: to poll takes longer, the more there are


class LoopbackTransport(Transport):
    """Transport of one rank among ``size`` ranks that are threads of one process.

    Example:
        >>> one, two = LoopbackTransport.group(2)
        >>> one.post(1, b"hello")
        >>> list(two.poll())
        [(0, b'hello')]
    """

    name = "loopback"
    scope = Scope.PROCESS

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size
        self._signal, self.exit_records = group.signals[rank], group.exit_records
        self.least_pause = _least_pause(rank, group.size)
        self._enter = partial(group.enter_collective, rank)

    @property
    def ring_group(self) -> SharedMemoryGroup | None:
        """All ranks, for small tensors; larger ones are copied straight to the receiver."""
        return self._group.window_group

    @property
    def window_group(self) -> SharedMemoryGroup | None:
        """All ranks, because they are threads of one process."""
        return self._group.window_group

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open a group of one rank: this process."""
        return cls.group(1)[0]

    @classmethod
    def group(cls, size: int) -> list[LoopbackTransport]:
        """Make a group of ranks; element r is the transport of rank r."""
        group = ThreadGroup(size)
        return [cls(group, rank) for rank in range(size)]

    def post(self, peer: int, message: bytes) -> None:
        """Append the message to the peer's inbox and wake the peer."""
        self._group.inboxes[peer].append((self.rank, message))
        self._group.signals[peer].set()

    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Return and clear the contents of this rank's inbox."""
        self._signal.clear()
        inbox = self._group.inboxes[self.rank]
        return [inbox.popleft() for _ in range(len(inbox))]

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Match the peer's receive; the later of the two calls copies the data."""
        return self._group.match_message(as_bytes(data), self.rank, peer, tag, sends=True)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Match the peer's send; the later of the two calls copies the data."""
        return self._group.match_message(as_bytes(out), peer, self.rank, tag, sends=False)

    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Start an allreduce; the last rank to enter sums for all, in rank order."""
        both = (tensor, tensor if out is None else out)
        return self._enter("allreduce", both, partial(_allreduce, divisor=divisor))

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start a reduce-scatter; the last rank to enter sums for all, in rank order."""
        compute = partial(_reduce_scatter, divisor=divisor)
        return self._enter("reduce_scatter", (tensor, out), compute)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast; the last rank to enter copies for all."""
        return self._enter(f"broadcast from rank {root}", tensor, partial(_broadcast, root=root))

    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an allgather; the last rank to enter concatenates for all."""
        return self._enter(f"allgather of {list(counts)} elements", (tensor, out), _allgather)

    def ibarrier(self) -> Request:
        """Start a barrier, which completes when the last rank enters."""
        return self._enter("barrier", None, lambda _: None)

    def split(self, color: int, key: int) -> Transport:
        """Split the group by color; the last rank to enter makes the parts."""
        request = self._enter("split", (color, key), _split)
        self.finish(request, 60.0, "split")
        group, rank = request.value
        return LoopbackTransport(group, rank)

    def split_members(self, ranks: Sequence[int], tag: int) -> Transport:
        """Join the other members in a new group, created by the first to arrive."""
        group = self._group.form_part(tuple(ranks), tag, self.rank)
        return LoopbackTransport(group, ranks.index(self.rank))

    def probe(self, tag: int) -> int | None:
        """Return a rank whose send to this rank waits for a receive."""
        with self._group.lock:
            waiting = [s for s, t, of in self._group.sends if (t, of) == (self.rank, tag)]
        return waiting[0] if waiting else None

    def machine_id(self) -> int:
        """Return 0: all ranks are on this machine."""
        return 0

    def backoff(self, attempt: int, *, background: bool = False) -> None:
        """Sleep until a peer wakes this rank; only window writes need polling."""
        first, longest = _PAUSES
        pause = min(longest, first * 2 ** min(attempt, 8))
        if self._signal.wait(max(pause, self.least_pause)):
            self._signal.clear()  # the caller looks again before the next backoff

    def wait_briefly(self, condition: Callable[[], bool], *, pure: bool = False) -> bool:
        """Block until a peer notifies this rank or sends it a message."""
        inbox, pause = self._group.inboxes[self.rank], max(_BRIEF, self.least_pause)
        if pure:
            self._signal.wait_for(lambda: bool(inbox) or condition(), pause)
            return condition()
        deadline = time.monotonic() + pause
        while (
            not (found := condition()) and not inbox and (left := deadline - time.monotonic()) > 0
        ):
            if self._signal.wait(left):
                self._signal.clear()
        return found

    def close(self) -> None:
        """Drop the unread messages."""
        self._group.inboxes[self.rank].clear()


def _least_pause(rank: int, size: int) -> float:
    """Return the seconds between two polls of a rank, staggered so that ranks do not coincide."""
    seconds = max(size / _POLLS_PER_SECOND, size**2 / _RANKS_POLLED_PER_SECOND)
    return seconds * (1.0 + 0.5 * (rank * 0.618034 % 1.0))


def _reduce(pairs: list[Any], divisor: int | None, verb: str) -> torch.Tensor:
    """Sum the ranks' terms in rank order, and divide the sum."""
    terms: list[torch.Tensor] = [given.detach() for given, _ in pairs]
    first = terms[0]
    for other in terms[1:]:
        if other.shape != first.shape or other.dtype != first.dtype:
            raise MismatchError(
                f"ranks met in one {verb} with {first.dtype} of shape {tuple(first.shape)} "
                f"and {other.dtype} of shape {tuple(other.shape)}"
            )
    return sum_of(terms, divisor)


def _allreduce(pairs: list[Any], divisor: int | None) -> None:
    total = _reduce(pairs, divisor, "allreduce")
    for _, out in pairs:
        out.copy_(total)


def _reduce_scatter(pairs: list[Any], divisor: int | None) -> None:
    parts = _reduce(pairs, divisor, "reduce_scatter").view(len(pairs), -1)
    for part, (_, out) in zip(parts, pairs, strict=True):
        out.copy_(part)


def _broadcast(tensors: list[Any], root: int) -> None:
    for tensor in tensors:
        if tensor is not tensors[root]:
            as_bytes(tensor).copy_(as_bytes(tensors[root]))


def _allgather(pairs: list[Any]) -> None:
    whole = torch.cat([tensor.reshape(-1) for tensor, _ in pairs])
    for _, out in pairs:
        out.copy_(whole)


def _split(colors_and_keys: list[Any]) -> list[Any]:
    """Make a group for each color; return every rank's group and rank in it."""
    parts: list[Any] = [None] * len(colors_and_keys)
    for color in {color for color, _ in colors_and_keys}:
        members = sorted((key, rank) for rank, (c, key) in enumerate(colors_and_keys) if c == color)
        group = ThreadGroup(len(members))
        for new_rank, (_, rank) in enumerate(members):
            parts[rank] = (group, new_rank)
    return parts
