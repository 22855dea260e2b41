"""``cuda_ipc``: between processes that share a GPU, through GPU memory that both have mapped.

The sender copies a piece into a buffer of its own on the GPU and sends a note of where that is; the
receiver copies it out and answers, and the buffer is used again. Nothing goes over the bus to the
host but the notes. Both know from events when a copy has ended, and nobody waits for the GPU.
Messages to other GPUs, and collectives, are staged as in ``cuda_staged``. Not run on a GPU yet;
tests run it between processes with memory of the host that both have mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterator
from typing import TypeAlias

import torch

from asyncddp.errors import ArgumentError, PeerError
from asyncddp.memory.pinned import PinnedPool
from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_staged import CudaStaged

__all__ = ["CudaIPC"]

_PIECE = 1 << 24  # bytes; the same on all ranks
_DEPTH = 2
_NOTE = 4096  # bytes of a note
_LIMIT = 1 << 28  # bytes of free buffers that are kept on the GPU

_Steps: TypeAlias = Generator["Event | Transfer", None, None]


class _Course:
    """A tensor on its way, a few pieces at a time; each piece yields what it waits for.

    Args:
        pieces: Makes the steps of each piece, in order.
        line: Courses of one line begin their pieces one after the other.
        drive: Moves all courses of the wire on.
        leaves: Whether it goes on where it is abandoned, since its receiver counts on it.
    """

    def __init__(
        self,
        pieces: Iterator[_Steps],
        line: Hashable,
        drive: Callable[[], None],
        *,
        leaves: bool,
    ) -> None:
        self._coming, self.line, self._drive, self._leaves = pieces, line, drive, leaves
        self._flight: list[_Piece] = []
        self._problem: PeerError | None = None
        self.all_begun = False

    @property
    def over(self) -> bool:
        """Whether nothing is left to be done."""
        return self._problem is not None or (self.all_begun and not self._flight)

    def done(self) -> bool:
        """Whether all pieces have arrived, and it went well."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self.over

    def abandon(self) -> None:
        """Give it up, but for pieces of which the other side has heard, and waits for an answer."""
        if self._leaves:
            return
        self._coming, self.all_begun = iter(()), True
        for piece in self._flight:
            if piece.fresh:
                piece.drop()
        self._flight = [piece for piece in self._flight if not piece.fresh]

    def move(self) -> None:
        """Go on as far as possible without waiting, the oldest piece first."""
        try:
            while self._moved():
                pass
        except PeerError as problem:
            self._problem = problem
            for piece in self._flight:
                piece.drop()
            self._flight.clear()

    def _moved(self) -> bool:
        while not self.all_begun and len(self._flight) < _DEPTH:
            steps = next(self._coming, None)
            if steps is None:
                self.all_begun = True
            else:
                self._flight.append(_Piece(steps))
        for piece in self._flight:
            if piece.wait.done():
                if not piece.move():
                    self._flight.remove(piece)
                return True
        return False


class _Piece:
    """A piece under way, and what it waits for."""

    def __init__(self, steps: _Steps) -> None:
        self._steps, self.wait, self.fresh = steps, next(steps), True

    def move(self) -> bool:
        """Take the next step; whether there is one."""
        following = next(self._steps, None)
        if following is not None:
            self.wait = following
        self.fresh = False
        return following is not None

    def drop(self) -> None:
        """Nobody waits for it any more."""
        abandon = getattr(self.wait, "abandon", None)  # an event has nothing to give up
        if abandon is not None:
            abandon()
        self._steps.close()


class _Turn:
    """An event that counts only once those before it have come, for what must go in order."""

    def __init__(self, event: Event, before: _Turn | None) -> None:
        self._event, self._before, self._reached = event, before, False

    def done(self) -> bool:
        """Whether it has come, and all before it have been seen to."""
        if not self._reached and (self._before is None or self._before._reached):
            self._reached, self._before = self._event.done(), None
        return self._reached


class CudaIPC(CudaStaged):
    """A wire for tensors on GPUs, through GPU memory where two ranks share a GPU.

    Args:
        base: The wire for tensors on the host, between the same ranks.
        streams: Of the device.
        near: Ranks that share this one's GPU, on this machine.
        notes: A wire of its own between the same ranks, for what the receiver is told.
        answers: Another one, for what the sender is told.

    References:
        CUDA C++ Programming Guide, "Interprocess Communication"; torch's
        ``torch.multiprocessing``, "Sharing CUDA tensors".
    """

    name = "cuda_ipc"

    def __init__(
        self,
        base: Transport,
        streams: DeviceStreams,
        near: Collection[int],
        notes: Transport,
        answers: Transport,
    ) -> None:
        super().__init__(base, streams)
        self._near, self._notes, self._answers = frozenset(near), notes, answers
        self._buffers = PinnedPool(streams, _LIMIT, streams.lendable)
        self._tokens: dict[int, bytes] = {}
        self._opened: dict[tuple[int, bytes], torch.Tensor] = {}
        self._courses: list[_Course] = []
        self._turns: dict[tuple[int, int], _Turn] = {}

    @classmethod
    def open(cls, base: Transport, streams: DeviceStreams, near: Collection[int]) -> CudaIPC:
        """Make the wire, with two more beneath it; collective.

        Args:
            base: The wire for tensors on the host.
            streams: Of the device.
            near: Ranks that share this one's GPU.
        """
        return cls(base, streams, near, base.split(0, base.rank), base.split(0, base.rank))

    def for_device(self, streams: DeviceStreams) -> Transport:
        """This wire, for tensors on its device, and on the host for what is dropped.

        Raises:
            ArgumentError: Another device of this rank.
        """
        if streams.device in (self.streams.device, torch.device("cpu")):
            return self
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, whose memory its peers "
            f"know, got one on {streams.device}; use the GPU of that number, local_rank() modulo "
            "the visible ones, or leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
        )

    def split(self, color: int, key: int) -> Transport:
        """Split the wire beneath; its parts are staged."""
        return CudaStaged(self.base.split(color, key), self.streams, self.pool)

    def close(self) -> None:
        """Let go of all buffers, and close the wires beneath."""
        self._courses.clear()
        self._opened.clear()
        self._notes.close()
        self._answers.close()
        super().close()

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Lend the peer copies of the tensor, piece by piece."""
        if peer not in self._near:
            return super().isend(data, peer, tag)
        return self._begin(data, Queue.OUT, self._lendings(data, peer, tag), ("to", peer, tag))

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Copy what the peer lends, piece by piece."""
        if peer not in self._near:
            return super().irecv(out, peer, tag)
        pieces = (self._borrowed(piece, peer, tag) for piece in _pieces(out))
        return self._begin(out, Queue.IN, pieces, ("from", peer, tag))

    def _begin(
        self, tensor: torch.Tensor, queue: Queue, pieces: Iterator[_Steps], line: Hashable
    ) -> Transfer:
        self.streams.after(queue, self.streams.mark(Queue.WORK))
        self.streams.hold(tensor, queue)
        course = _Course(pieces, line, self._drive_courses, leaves=queue is Queue.OUT)
        self._courses.append(course)
        self._drive_courses()
        return course

    def _drive_courses(self) -> None:
        waiting: set[Hashable] = set()
        for course in self._courses:
            if course.line not in waiting:
                course.move()
            if not course.all_begun:
                waiting.add(course.line)
        self._courses = [course for course in self._courses if not course.over]

    def _lendings(self, data: torch.Tensor, peer: int, tag: int) -> Iterator[_Steps]:
        line = peer, tag
        for piece in _pieces(data):
            buffer = self._buffers.take(_room(piece.nbytes))
            if piece.nbytes:
                self.streams.copy(buffer[: piece.nbytes], piece, Queue.OUT)
            turn = _Turn(self.streams.mark(Queue.OUT), self._turns.pop(line, None))
            self._turns[line] = turn
            yield self._lent(buffer, turn, peer, tag)

    def _lent(self, buffer: torch.Tensor, turn: _Turn, peer: int, tag: int) -> _Steps:
        """Once a copy is made tell the peer, and wait until it has taken it."""
        yield turn
        if self._turns.get((peer, tag)) is turn:
            del self._turns[peer, tag]
        token = self._tokens.get(buffer.data_ptr())
        if token is None:
            token = self._tokens[buffer.data_ptr()] = self.streams.lend(buffer)
        sending = self._notes.isend(_written(token), peer, tag)
        answer = self._answers.irecv(torch.empty(1, dtype=torch.uint8), peer, tag)
        yield sending
        yield answer
        if not self._buffers.give(buffer):
            del self._tokens[buffer.data_ptr()]

    def _borrowed(self, out: torch.Tensor, peer: int, tag: int) -> _Steps:
        """Wait for a note, copy what it names, and answer once that has ended."""
        note = torch.empty(_NOTE, dtype=torch.uint8)
        yield self._notes.irecv(note, peer, tag)
        token = _read(note)
        source = self._opened.get((peer, token))
        if source is None:
            source = self._opened[peer, token] = self.streams.borrow(token)
        if out.nbytes:
            self.streams.copy(out, source[: out.nbytes], Queue.IN)
        yield self.streams.mark(Queue.IN)
        yield self._answers.isend(torch.zeros(1, dtype=torch.uint8), peer, tag)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = as_bytes(tensor)
    for first in range(0, max(1, flat.numel()), _PIECE):
        yield flat[first : first + _PIECE]


def _room(size: int) -> int:
    """Bytes of the buffer for so many: a power of two, so that few sizes wait in the pool."""
    return max(1 << 12, 1 << max(0, size - 1).bit_length())


def _written(token: bytes) -> torch.Tensor:
    note = len(token).to_bytes(4, "little") + token
    if len(note) > _NOTE:
        raise RuntimeError(f"a handle of {len(token)} bytes: expected at most {_NOTE - 4}")
    return torch.frombuffer(bytearray(note.ljust(_NOTE, b"\0")), dtype=torch.uint8)


def _read(note: torch.Tensor) -> bytes:
    data = note.numpy().tobytes()
    return data[4 : 4 + int.from_bytes(data[:4], "little")]
