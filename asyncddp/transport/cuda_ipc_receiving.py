"""What arrives over ``cuda_ipc``: copied, or read where the peer shows it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import torch

from asyncddp.memory.streams import DeviceStreams, Event, Queue, empty_on
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_ipc_borrower import Borrower
from asyncddp.transport.cuda_ipc_courses import Arriving, Borrowed, Courses, Steps
from asyncddp.transport.cuda_ipc_lender import Reading
from asyncddp.transport.cuda_ipc_notes import NOTE, Note, blank, read

__all__ = ["Receiving"]

_Course = TypeVar("_Course", Arriving, Borrowed)


class Receiving:
    """Takes what peers show.

    Args:
        streams: Of the device.
        borrower: Opens it, and answers.
        notes: A wire for notes.
        courses: All that is on its way.
        drive: Moves it on.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        borrower: Borrower,
        notes: Transport,
        courses: Courses,
        drive: Callable[[], None],
    ) -> None:
        self._streams, self._borrower, self._notes = streams, borrower, notes
        self._courses, self._drive = courses, drive

    def copy(self, out: torch.Tensor, peer: int, tag: int) -> Arriving:
        """Start to copy what a peer shows; done once that has been copied."""
        course = Arriving(("from", peer, tag), self._drive)
        self._streams.hold(out, Queue.WORK)
        course.go(self._received(course, as_bytes(out), peer, tag))
        return self._started(course)

    def borrow(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        peer: int,
        tag: int,
        through: Callable[[torch.Tensor], Transfer] | None,
    ) -> Borrowed:
        """Start to look at what a peer shows; what comes in pieces is put together here.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            peer: The peer.
            tag: The tag.
            through: Starts to receive it another way; None where the peer shows it.
        """
        loan = Borrowed(("from", peer, tag), self._drive)
        if through is None:
            loan.go(self._borrowed(loan, shape, dtype, peer, tag))
        else:
            loan.go(self._staged(loan, empty_on(self._streams, shape, dtype), through))
        return self._started(loan)

    def _started(self, course: _Course) -> _Course:
        self._courses.add(course)
        self._drive()
        return course

    def _received(self, course: Arriving, out: torch.Tensor, peer: int, tag: int) -> Steps:
        note = yield from self._note(course, peer, tag)
        yield from self._put_together(course, out, peer, tag, note)
        yield None
        yield self._streams.mark(Queue.WORK)

    def _borrowed(
        self, loan: Borrowed, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> Steps:
        note = yield from self._note(loan, peer, tag)
        if note.last:
            source = self._borrower.take(peer, note)
            tensor = source.view(dtype).view(shape)
            loan.here(tensor, lambda: self._borrower.answer(peer, tag, note))
            return
        whole = empty_on(self._streams, shape, dtype)
        yield from self._put_together(loan, as_bytes(whole), peer, tag, note)
        loan.here(whole)

    def _staged(
        self, loan: Borrowed, whole: torch.Tensor, through: Callable[[torch.Tensor], Transfer]
    ) -> Steps:
        loan.begun = True
        transfer = through(whole)
        yield None
        yield transfer
        loan.here(whole)

    def _put_together(
        self, course: Arriving, out: torch.Tensor, peer: int, tag: int, note: Note
    ) -> Steps:
        """Copy piece after piece, and answer each as soon as its copy is queued."""
        start = 0
        while True:
            source = self._borrower.take(peer, note)
            if course.wanted and note.size:
                self._streams.copy(out[start : start + note.size], source, Queue.WORK)
            del source
            self._borrower.answer(peer, tag, note)
            start += note.size
            if note.last:
                return
            note = yield from self._note(course, peer, tag)

    def _note(
        self, course: Arriving, peer: int, tag: int
    ) -> Generator[Event | Transfer | Reading | None, None, Note]:
        paper = blank(NOTE)
        yield self._notes.irecv(paper, peer, tag)
        course.begun = True
        return read(paper, Note, peer)
