"""Abstract base class of transports: control messages, point-to-point tensors, collectives.

A transport moves bytes between the ranks of one group and knows nothing of operations, names or
weights. Every call is nonblocking and returns a :class:`Request`; the blocking forms with a
deadline are written once, here. Buffers are contiguous CPU tensors. They stay the caller's, who
neither reads nor writes them until the request has completed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import inf
from typing import ClassVar, NamedTuple, Protocol

import torch

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.errors import EnvironmentProblem, PeerError, WaitTimeoutError
from asyncddp.membership import View
from asyncddp.shm.arena import Arena
from asyncddp.shm.collective_slots import CollectiveSlots
from asyncddp.tensors.allocation import empty
from asyncddp.transport.join_procedure import JoinProcedure
from asyncddp.transport.startup_deadline import StartupDeadline


class Request(Protocol):
    """Interface of a nonblocking send, receive or collective, to test for completion or abandon."""

    def done(self) -> bool:
        """Test, without blocking, for completion; a PeerError if the operation has failed."""
        ...

    def abandon(self) -> None:
        """Give up waiting for the operation; data that arrives for it later is dropped."""
        ...


SHORT_BYTES = 1 << 14
"""Bytes of a tensor up to which it costs latency rather than bandwidth."""
TRANSFER_ERRORS = (RuntimeError, OSError, MemoryError)
"""Exceptions of a transfer: a PeerError, an error of a device's library, lack of memory."""


def is_short(nbytes: int, parts: int = 1) -> bool:
    """Tell whether a collective takes few messages in a row, of whole tensors, rather than parts.

    ``parts`` tells of how many ranks' tensors the bytes are.
    """
    return nbytes <= SHORT_BYTES * parts


def has_ended(request: Request) -> bool:
    """Tell whether a request has ended, with success or an error."""
    try:
        return request.done()
    except TRANSFER_ERRORS:
        return True


COLLECTIVE_GIVEN_UP = "an earlier collective was given up while some ranks had not joined it"
"""Reason why later collectives cannot run."""


def collectives_broken(why: str) -> PeerError:
    """Make the error of a collective that cannot run for a reason."""
    return PeerError(f"collectives cannot go on: {why}. End and restart the run.")


class Scope(Enum):
    """Scope of a transport: which ranks it can connect."""

    PROCESS = "threads of one process"
    MACHINE = "processes of one machine"
    ANY = "any"


@dataclass(frozen=True)
class SharedMemoryGroup:
    """Ranks of one machine that can map each other's shared memory."""

    arena: Arena  # allocates this rank's shared memory, and maps that of the other ranks
    processes: dict[int, int]  # process ids by rank, this rank's own among them
    notify: Callable[[int], None] | None = None  # wakes a rank to read, where ranks do not poll
    largest: float = inf  # bytes of the largest tensors that go through ring buffers

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(sorted(self.processes))


class ExitRecord(NamedTuple):
    """Record of a rank's exit: reason, time, and number of collectives of each kind before it."""

    reason: str
    collective_counts: Mapping[str, int]  # of each kind, before its exit
    since: float
    failed: bool = False


class Transport(ABC):
    """Base class of transports: the endpoint of rank ``rank`` among ``size`` connected ranks.

    Messages between two ranks arrive in the order in which they were posted. Collectives are
    started in the same order on all ranks; sums of floats are formed in an order of the
    transport's choice that is the same on all ranks.
    """

    name: str
    """Name by which users choose it."""
    scope: ClassVar[Scope] = Scope.ANY
    """Ranks between which it carries tensors itself."""
    messages_by: ClassVar[str | None] = None
    """Name of the transport of messages, also of those out of scope, where it is another one."""
    started_by_mpi: ClassVar[bool] = False
    """True if MPI says how many ranks there are, which a launcher may contradict."""
    local_path: ClassVar[str] = "straight from the tensor's memory"
    """Path of a host tensor's bytes to a rank of the same machine, for ``asyncddp doctor``."""
    remote_path: ClassVar[str] = "straight from the tensor's memory"
    """Path of a host tensor's bytes to a rank of another machine, for ``asyncddp doctor``."""
    rank: int
    size: int
    broken: str | None = None
    """Reason why no further collective can run; None if they can."""
    allows_threads: bool = True
    """True if several threads of this rank may call the transport, one at a time."""
    cores_shared: bool = False
    """True if the ranks of this machine outnumber the cores that they may use."""
    exit_records: dict[int, ExitRecord] | None = None
    """Of all ranks, where they share them; None where they tell each other."""
    least_pause: float = 0.0
    """Seconds between two polls of an idle rank at least, so that it leaves time to the others."""
    shared_memory_group: SharedMemoryGroup | None = None
    """Ranks that exchange tensors through shared memory, which bypasses the calls below."""
    collective_slots: CollectiveSlots | None = None
    """Slots for collectives of its ranks, if they all share memory; None otherwise."""
    joining: JoinProcedure | None = None
    """Joining of a process that takes a lost rank's place, until it takes part; else None."""
    outside: View | None = None
    """View of the others, which this rank is to join; None if it has begun with them."""
    device_watches: list[Callable[[float], object]] | None = None
    """Their :meth:`watch`, called in every round of progress with the deadline, in seconds."""
    device_transports: dict[DeviceStreams, Transport] | None = None
    """Transports for device tensors that are built on this one, by the streams of each device."""
    device_transport_factory: Callable[[DeviceStreams], Transport] | None = None
    """Makes such a transport where the ranks have agreed on another one than ``cuda_staged``."""

    @classmethod
    def join(cls, startup: StartupDeadline, *, required: bool = True) -> Transport:
        """Open the transport between all ranks of this job, or raise a WaitTimeoutError.

        It is not ``required`` if the user has not named it, so that a lesser one will do.
        """
        return cls()

    @property
    def window_group(self) -> SharedMemoryGroup | None:
        """Ranks that read each other's window memory directly, including this rank."""
        return self.shared_memory_group

    @property
    def ring_group(self) -> SharedMemoryGroup | None:
        """Ranks that exchange tensors through ring buffers, including this rank."""
        return self.shared_memory_group

    def connect(self, peers: Iterable[int]) -> None:
        """Start to connect with peers before the first message, where that takes long."""
        return

    def failed_peers(self) -> Mapping[int, str]:
        """Return the ranks that the transport knows to have ended irregularly, with the reason."""
        return {}

    def has_ended(self, peer: int) -> bool:
        """Return whether a failed peer acts no more; False if it may only be out of reach."""
        return True

    def pending_replacements(self) -> Iterable[tuple[int, bool]]:
        """Return processes that would be a lost rank, each once; True with those that are ready."""
        return ()

    def answer_replacement(self, peer: int, view: View, refusal: str = "") -> None:
        """Tell such a process the view, and why it cannot join."""
        raise EnvironmentProblem(f"transport {self.name} cannot go on with another process")

    def readmit(self, peer: int) -> None:
        """Exchange messages with the process that has become a lost rank."""
        raise EnvironmentProblem(f"transport {self.name} cannot go on with another process")

    def watch(self, timeout: float) -> object:
        """Advance all requests, including those that no thread waits for; called often.

        Work on a device that all ranks have posted, and of which nothing has ended for ``timeout``
        seconds, is aborted, where the transport can.
        """
        return None

    @abstractmethod
    def post(self, peer: int, message: bytes) -> None:
        """Send a short control message; the call never waits for the peer."""

    @abstractmethod
    def poll(self) -> Iterable[tuple[int, bytes]]:
        """Return the control messages received since the last call, with their senders."""

    @abstractmethod
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Start sending the bytes of ``data`` to a peer (0 <= tag < 32768)."""

    @abstractmethod
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start receiving exactly as many bytes as ``out`` has, into ``out``."""

    def probe(self, tag: int) -> int | None:
        """Return a rank with an unreceived message of this tag; None if there is none."""
        raise EnvironmentProblem(f"transport {self.name} cannot receive from any rank")

    @abstractmethod
    def iallreduce(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, divisor: int | None = None
    ) -> Request:
        """Start summing ``tensor`` over all ranks (bool: the logical or), into ``out`` or in place.

        ``divisor`` divides the sum; of integers in float64, rounded half to even. Where ``out`` is
        given, ``tensor`` stays unchanged.
        """

    @abstractmethod
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start summing ``tensor`` over all ranks (bool: the logical or); each rank keeps a part.

        ``tensor`` is flat, with ``size`` parts of equal length; ``out`` gets the sum of part
        ``rank``, and is no part of ``tensor``. ``divisor`` divides the sum, as of an allreduce.
        """

    @abstractmethod
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start a broadcast of ``tensor`` from the root rank, in place."""

    @abstractmethod
    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start concatenating all ranks' elements in ``out``; rank r gives ``counts[r]``."""

    @abstractmethod
    def ibarrier(self) -> Request:
        """Start a barrier, which completes once all ranks have started it."""

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Make a transport among the ranks of equal color, ordered by (key, rank); collective."""

    def split_members(self, ranks: Sequence[int], tag: int) -> Transport:
        """Make a transport among these ranks, in this order; collective over only these ranks.

        ``tag`` (0 <= tag < 32768) keeps calls apart that some ranks make at the same time.
        """
        raise EnvironmentProblem(f"transport {self.name} cannot make groups of some ranks")

    @abstractmethod
    def machine_id(self) -> int:
        """Return a number that identifies this rank's machine; collective."""

    def machine_ids(self) -> list[int]:
        """Return a number for each rank's machine, where they are known without the others."""
        raise EnvironmentProblem(f"transport {self.name} does not know the others' machines")

    @abstractmethod
    def backoff(self, attempt: int, *, background: bool = False) -> None:
        """Pause between two polls; longer after more polls that found nothing.

        A ``background`` thread runs beside a computation, which has priority.
        """

    def wait_briefly(self, condition: Callable[[], bool], *, pure: bool = False) -> bool:
        """Wait briefly for a shared-memory condition or a message; tell whether it holds.

        Peers that notify this rank do not wake it before a ``pure`` condition holds.
        """
        return condition()

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources; harmless when called twice."""

    def break_collectives(self) -> None:
        """Refuse further collectives, because one was abandoned."""
        self.broken = COLLECTIVE_GIVEN_UP

    def require_collectives(self) -> None:
        """Raise a PeerError if no further collective can run."""
        if self.broken:
            raise collectives_broken(self.broken)

    def abort(self, code: int) -> None:
        """End all ranks with this exit code, where the transport can."""
        raise SystemExit(code)

    def finish(self, request: Request, timeout: float, what: str) -> None:
        """Wait until a request has completed; WaitTimeoutError after ``timeout`` seconds."""
        attempt, deadline = 0, time.monotonic() + timeout
        while not request.done():
            if time.monotonic() > deadline:
                request.abandon()
                raise WaitTimeoutError(f"rank {self.rank}: {what} was not done in {timeout:g} s")
            self.backoff(attempt)
            attempt += 1

    def send(self, data: torch.Tensor, peer: int, tag: int, timeout: float) -> None:
        """Send ``data`` to a peer, and wait until ``data`` may be modified again."""
        self.finish(self.isend(data, peer, tag), timeout, f"send to rank {peer}, tag {tag},")

    def receive(self, out: torch.Tensor, peer: int, tag: int, timeout: float) -> None:
        """Receive into ``out`` from a peer and wait."""
        self.finish(self.irecv(out, peer, tag), timeout, f"receive from rank {peer}, tag {tag},")

    def allreduce(self, tensor: torch.Tensor, timeout: float) -> None:
        """Sum over all ranks, in place, and wait."""
        self.finish(self.iallreduce(tensor), timeout, "allreduce")

    def reduce_scatter(self, tensor: torch.Tensor, timeout: float) -> torch.Tensor:
        """Sum over all ranks, wait, and return this rank's part of the sum."""
        out = empty((tensor.numel() // self.size,), tensor.dtype)
        self.finish(self.ireduce_scatter(tensor, out), timeout, "reduce_scatter")
        return out

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: float) -> None:
        """Broadcast from the root rank, in place, and wait."""
        self.finish(self.ibroadcast(tensor, root), timeout, f"broadcast from rank {root}")

    def allgather(
        self, tensor: torch.Tensor, counts: Sequence[int], timeout: float
    ) -> torch.Tensor:
        """Gather ``counts[r]`` elements of every rank r into one flat tensor, and wait."""
        out = empty((sum(counts),), tensor.dtype)
        self.finish(self.iallgather(tensor, out, counts), timeout, "allgather")
        return out

    def barrier(self, timeout: float) -> None:
        """Wait until all ranks have called it."""
        self.finish(self.ibarrier(), timeout, "barrier")
