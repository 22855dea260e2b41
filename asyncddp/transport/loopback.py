"""``loopback``: the ranks are threads of one process; the same code path without MPI."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from asyncddp.errors import MismatchError
from asyncddp.memory.allocate import copied
from asyncddp.memory.private import PrivateArena
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Neighborhood, Transfer, Transport
from asyncddp.transport.starting import Start

__all__ = ["Loopback"]

_Job = Callable[[list[Any]], list[Any]]


class _Promise:
    """A transfer that somebody else fulfils."""

    def __init__(self) -> None:
        self.value: Any = None
        self._ended = False
        self._error: Exception | None = None
        self.dropped = False

    def fulfil(self, value: Any = None) -> None:
        """It has happened."""
        self.value, self._ended = value, True

    def fail(self, error: Exception) -> None:
        """It has failed."""
        self._error, self._ended = error, True

    def done(self) -> bool:
        """Whether it has happened; raises what made it fail."""
        if self._error is not None:
            raise self._error
        return self._ended

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.dropped = True


class _Hub:
    """What the ranks of one group share: inboxes, unmatched transfers, open collectives."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.bells = [threading.Event() for _ in range(size)]
        self.inboxes: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.sends: dict[tuple[int, int, int], deque[tuple[torch.Tensor, _Promise]]] = {}
        self.receives: dict[tuple[int, int, int], deque[tuple[torch.Tensor, _Promise]]] = {}
        self.rounds: dict[int, dict[int, tuple[str, Any, _Promise]]] = {}
        self.size = size
        self.visible = Neighborhood(PrivateArena(), dict.fromkeys(range(size), os.getpid()))

    def meet(
        self, data: torch.Tensor, source: int, target: int, tag: int, *, sends: bool
    ) -> _Promise:
        """Pair a send with its receive, whichever comes second; the second one copies."""
        mine, theirs = (self.sends, self.receives) if sends else (self.receives, self.sends)
        key, promise = (source, target, tag), _Promise()
        with self.lock:
            waiting = theirs.get(key)
            while waiting and waiting[0][1].dropped:
                waiting.popleft()
            if not waiting:
                mine.setdefault(key, deque()).append((data, promise))
                return promise
            other, partner = waiting.popleft()
            if not waiting:
                del theirs[key]
        to, given = (other, data) if sends else (data, other)
        if to.numel() != given.numel():
            error = MismatchError(
                f"rank {source} sent {given.numel()} bytes to rank {target}, which expected "
                f"{to.numel()}"
            )
            partner.fail(error)
            promise.fail(error)
        else:
            to.copy_(given)
            partner.fulfil()
            promise.fulfil()
        self.bells[target if sends else source].set()
        return promise

    def join(self, rank: int, number: int, kind: str, value: Any, job: _Job) -> _Promise:
        """Enter collective ``number``; the last rank to enter does the job for all."""
        promise = _Promise()
        with self.lock:
            entered = self.rounds.setdefault(number, {})
            entered[rank] = (kind, value, promise)
            if len(entered) < self.size:
                return promise
            del self.rounds[number]
        kinds = {entered[r][0] for r in range(self.size)}
        try:
            if len(kinds) > 1:
                raise MismatchError(f"ranks met in different collectives: {sorted(kinds)}")
            results = job([entered[r][1] for r in range(self.size)])
        except (MismatchError, RuntimeError) as error:
            for _, _, waiting in entered.values():
                waiting.fail(MismatchError(str(error)))
        else:
            for r, (_, _, waiting) in entered.items():
                waiting.fulfil(results[r])
        for bell in self.bells:
            bell.set()
        return promise


class Loopback(Transport):
    """One of ``size`` ranks that live in one process.

    Example:
        >>> one, two = Loopback.group(2)
        >>> one.post(1, b"hello")
        >>> list(two.poll())
        [(0, b'hello')]
    """

    name = "loopback"

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self.rank, self.size = hub, rank, hub.size
        self._bell = hub.bells[rank]
        self._rounds = 0

    @property
    def visible(self) -> Neighborhood | None:
        """All ranks, since they are threads of one process."""
        return self._hub.visible

    @classmethod
    def join(cls, start: Start) -> Transport:
        """This process alone."""
        del start
        return cls.group(1)[0]

    @classmethod
    def group(cls, size: int) -> list[Loopback]:
        """Make a group; element r is rank r's end."""
        hub = _Hub(size)
        return [cls(hub, rank) for rank in range(size)]

    def post(self, peer: int, message: bytes) -> None:
        """Put the message into the peer's inbox and ring its bell."""
        self._hub.inboxes[peer].append((self.rank, message))
        self._hub.bells[peer].set()

    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Empty the inbox."""
        self._bell.clear()
        inbox = self._hub.inboxes[self.rank]
        return [inbox.popleft() for _ in range(len(inbox))]

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Meet the receive; whichever comes second copies."""
        return self._hub.meet(as_bytes(data), self.rank, peer, tag, sends=True)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Meet the send; whichever comes second copies."""
        return self._hub.meet(as_bytes(out), peer, self.rank, tag, sends=False)

    def _join(self, kind: str, value: Any, job: _Job) -> _Promise:
        self._rounds += 1
        return self._hub.join(self.rank, self._rounds, kind, value, job)

    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """The last rank to come sums for all, in the order of the ranks."""
        given = (tensor, tensor if out is None else out)
        return self._join("allreduce", given, lambda all_: _sum(all_, divisor))

    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """The last rank to come sums for all, in the order of the ranks."""
        return self._join("reduce_scatter", (tensor, out), lambda all_: _scatter(all_, divisor))

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """The last rank to come copies for all."""
        return self._join(f"broadcast from rank {root}", tensor, lambda all_: _copy(all_, root))

    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """The last rank to come concatenates for all."""
        return self._join(f"allgather of {list(counts)} elements", (tensor, out), _gather)

    def ibarrier(self) -> Transfer:
        """Done when the last rank comes."""
        return self._join("barrier", None, lambda all_: all_)

    def split(self, color: int, key: int) -> Transport:
        """The last rank to come makes the parts."""
        promise = self._join("split", (color, key), _split)
        self.finish(promise, 60.0, "split")
        hub, rank = promise.value
        return Loopback(hub, rank)

    def machine(self) -> int:
        """One process is one machine."""
        return 0

    def rest(self, attempt: int, *, background: bool = False) -> None:
        """Sleep until the bell rings, for a moment at most."""
        if self._bell.wait(0.0005 if attempt < 100 else 0.005):
            self._bell.clear()  # whoever rests looks again before it rests again

    def close(self) -> None:
        """Drop what nobody has read."""
        self._hub.inboxes[self.rank].clear()


def _total(pairs: list[Any], divisor: int | None, verb: str) -> torch.Tensor:
    total: torch.Tensor = copied(pairs[0][0])
    for other, _ in pairs[1:]:
        if other.shape != total.shape or other.dtype != total.dtype:
            raise MismatchError(
                f"ranks met in one {verb} with {total.dtype} of shape {tuple(total.shape)} "
                f"and {other.dtype} of shape {tuple(other.shape)}"
            )
        total = total.logical_or_(other) if total.dtype == torch.bool else total.add_(other)
    return total if divisor is None else total.div_(divisor)


def _sum(pairs: list[Any], divisor: int | None) -> list[Any]:
    total = _total(pairs, divisor, "allreduce")
    for _, out in pairs:
        out.copy_(total)
    return pairs


def _scatter(pairs: list[Any], divisor: int | None) -> list[Any]:
    parts = _total(pairs, divisor, "reduce_scatter").view(len(pairs), -1)
    for part, (_, out) in zip(parts, pairs, strict=True):
        out.copy_(part)
    return pairs


def _copy(tensors: list[Any], root: int) -> list[Any]:
    for tensor in tensors:
        if tensor is not tensors[root]:
            as_bytes(tensor).copy_(as_bytes(tensors[root]))
    return tensors


def _gather(pairs: list[Any]) -> list[Any]:
    whole = torch.cat([tensor.reshape(-1) for tensor, _ in pairs])
    for _, out in pairs:
        out.copy_(whole)
    return pairs


def _split(wishes: list[Any]) -> list[Any]:
    places: list[Any] = [None] * len(wishes)
    for color in {color for color, _ in wishes}:
        members = sorted((key, rank) for rank, (c, key) in enumerate(wishes) if c == color)
        hub = _Hub(len(members))
        for place, (_, rank) in enumerate(members):
            places[rank] = (hub, place)
    return places
