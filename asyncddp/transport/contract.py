"""What a wire can do: short ordered messages, bulk bytes, collectives.

A transport moves bytes between the ranks of one group and knows nothing of verbs, names or weights.
Everything is started without waiting and gives a :class:`Transfer`; the waiting forms with a
deadline are written once, here. Buffers are contiguous CPU tensors. They stay the caller's, who
leaves them alone until the transfer is done.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from asyncddp.errors import WaitTimeoutError
from asyncddp.memory.allocate import empty
from asyncddp.memory.shared import Arena
from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.starting import Start

__all__ = ["Neighborhood", "Transfer", "Transport"]


class Transfer(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Whether it has ended; never waits.

        Raises:
            PeerError: It has failed.
        """
        ...

    def abandon(self) -> None:
        """Give up waiting for it: whatever arrives later is dropped."""
        ...


@dataclass(frozen=True)
class Neighborhood:
    """The ranks that see each other's memory.

    Attributes:
        arena: Memory that this rank shows, and what it has seen of the others'.
        processes: Their process ids by rank, this rank's own among them.
    """

    arena: Arena
    processes: Mapping[int, int]


class Transport(ABC):
    """One wire between ``size`` ranks, of which this is number ``rank``.

    Messages between two ranks arrive in the order in which they were posted. Collectives are
    started in the same order on all ranks; sums of floats are formed in an order of the wire's
    choice that is the same on all ranks.
    """

    name: ClassVar[str]
    rank: int
    size: int
    threads: bool = True
    """Whether several threads of this rank may call the transport, one at a time."""
    neighborhood: Neighborhood | None = None
    """Ranks with whom tensors are exchanged through memory, around all that is below."""
    device_wires: dict[DeviceStreams, Transport] | None = None
    """Wires over this one for tensors on devices, by the streams of each device."""
    device_wire: Callable[[DeviceStreams], Transport] | None = None
    """What makes such a wire, where the ranks have agreed on another one than ``cuda_staged``."""

    @classmethod
    def join(cls, start: Start) -> Transport:
        """Open the wire between all ranks of this job.

        Args:
            start: How long this rank waits for the others.

        Raises:
            WaitTimeoutError: Some of them have not come by the deadline.
        """
        del start
        return cls()

    @property
    def visible(self) -> Neighborhood | None:
        """Ranks that read what this one publishes in windows where it lies, and it theirs."""
        return self.neighborhood

    @abstractmethod
    def post(self, peer: int, message: bytes) -> None:
        """Send a short message; the call never waits for the peer."""

    @abstractmethod
    def poll(self) -> Iterable[tuple[int, bytes]]:
        """The messages that have come since the last call, with their senders."""

    @abstractmethod
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Start sending the bytes of ``data`` (0 <= tag < 32768)."""

    @abstractmethod
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Start receiving exactly the bytes of ``out``."""

    @abstractmethod
    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """Start summing ``tensor`` over ranks (bool: forming the logical or).

        Args:
            tensor: What this rank adds; left as it is unless it is ``out``.
            out: Where the sum goes; ``tensor`` if not given.
            divisor: By which the sum of floats is divided; 1 if not given.
        """

    @abstractmethod
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """Start summing ``tensor`` over ranks (bool: forming the logical or); each keeps a part.

        Args:
            tensor: What this rank adds: ``size`` parts of equal length, part r for rank r; flat.
            out: Where the sum of part ``rank`` goes; flat, and no part of ``tensor``.
            divisor: By which the sum of floats is divided; 1 if not given.
        """

    @abstractmethod
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """Start replacing ``tensor`` by the root's."""

    @abstractmethod
    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """Start filling the flat ``out`` with all ranks' elements; rank r gives ``counts[r]``."""

    @abstractmethod
    def ibarrier(self) -> Transfer:
        """Start a barrier: done once all ranks have started it."""

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Make a transport among the ranks of equal color, ordered by (key, rank); collective."""

    @abstractmethod
    def machine(self) -> int:
        """A number that ranks share which share a machine; collective."""

    @abstractmethod
    def rest(self, attempt: int, *, background: bool = False) -> None:
        """Leave the core to others for a moment; longer the more attempts came to nothing.

        Args:
            attempt: How many looks in a row came to nothing.
            background: Whether this thread works beside a computation, which needs the core more.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what was taken; harmless when called twice."""

    def abort(self, code: int) -> None:
        """End all ranks with this exit code, where the wire can."""
        raise SystemExit(code)

    def finish(self, transfer: Transfer, timeout: float, what: str) -> None:
        """Wait for a transfer.

        Raises:
            WaitTimeoutError: It was not done after ``timeout`` seconds.
        """
        attempt, deadline = 0, time.monotonic() + timeout
        while not transfer.done():
            if time.monotonic() > deadline:
                transfer.abandon()
                raise WaitTimeoutError(f"rank {self.rank}: {what} was not done in {timeout:g} s")
            self.rest(attempt)
            attempt += 1

    def send(self, data: torch.Tensor, peer: int, tag: int, timeout: float) -> None:
        """Send and wait until ``data`` may be changed again."""
        self.finish(self.isend(data, peer, tag), timeout, f"send to rank {peer}, tag {tag},")

    def receive(self, out: torch.Tensor, peer: int, tag: int, timeout: float) -> None:
        """Receive and wait."""
        self.finish(self.irecv(out, peer, tag), timeout, f"receive from rank {peer}, tag {tag},")

    def allreduce(self, tensor: torch.Tensor, timeout: float) -> None:
        """Sum over ranks, in place, and wait."""
        self.finish(self.iallreduce(tensor), timeout, "allreduce")

    def reduce_scatter(self, tensor: torch.Tensor, timeout: float) -> torch.Tensor:
        """Sum over ranks and wait; this rank's part of the sum."""
        out = empty((tensor.numel() // self.size,), tensor.dtype)
        self.finish(self.ireduce_scatter(tensor, out), timeout, "reduce_scatter")
        return out

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float) -> None:
        """Broadcast, in place, and wait."""
        self.finish(self.ibroadcast(tensor, root), timeout, f"broadcast from rank {root}")

    def allgather(
        self, tensor: torch.Tensor, counts: Sequence[int], timeout: float
    ) -> torch.Tensor:
        """Gather ``counts[r]`` elements of every rank r into one flat tensor, and wait."""
        out = empty((sum(counts),), tensor.dtype)
        self.finish(self.iallgather(tensor, out, counts), timeout, "allgather")
        return out

    def barrier(self, timeout: float) -> None:
        """Wait until all ranks are here."""
        self.finish(self.ibarrier(), timeout, "barrier")
