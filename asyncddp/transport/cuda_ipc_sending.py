"""What leaves over ``cuda_ipc``: the tensor itself where it lasts, a copy where it does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer
from asyncddp.transport.cuda_ipc_courses import Courses, Leaving, Steps
from asyncddp.transport.cuda_ipc_lender import Lender, Reading
from asyncddp.transport.cuda_ipc_memory import Memory, Shown
from asyncddp.transport.lending import Lent

__all__ = ["WHOLE", "Sending", "Sent", "Staged"]

WHOLE = 1 << 28
"""Bytes up to which a copy is made at once."""
_PIECE = 1 << 26  # bytes of the pieces of a larger one
_DEPTH = 2  # such pieces that a peer may have yet to read
_LASTING = 1 << 20  # bytes from which a tensor is shown itself where that is safe


class Sending:
    """Shows tensors to peers whose GPU is in reach.

    Args:
        streams: Of the device.
        memory: What is shown.
        lender: Tells peers of it.
        courses: All that is on its way.
        drive: Moves it on.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        memory: Memory,
        lender: Lender,
        courses: Courses,
        drive: Callable[[], None],
    ) -> None:
        self._streams, self._memory, self._lender = streams, memory, lender
        self._courses, self._drive = courses, drive

    def lend(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float, *, lasting: bool
    ) -> dict[int, Leaving]:
        """Start to show a tensor, or a multiple of one that is no larger than ``WHOLE``.

        Args:
            data: Contiguous.
            tags: The tag for each peer.
            factor: With which it is multiplied.
            lasting: Whether it stays as it is until all have answered.
        """
        self._streams.hold(data, Queue.WORK)
        courses = {peer: Leaving(("to", peer, tag), self._drive) for peer, tag in tags.items()}
        shown: Shown | None = None
        if lasting and factor == 1.0 and data.nbytes >= _LASTING:
            shown = self._memory.sent_before(data, tags)
        buffer = None
        if shown is None and 0 < data.nbytes <= WHOLE:
            buffer = self._copy_of(data, factor, len(tags))
        for peer, course in courses.items():
            if shown is not None:
                course.go(self._shown(data, shown, peer, tags[peer]))
            elif data.nbytes > WHOLE:
                course.go(self._in_pieces(course, as_bytes(data), peer, tags[peer]))
            else:
                course.copied = True
                course.go(self._copied(buffer, data.nbytes, peer, tags[peer]))
            self._courses.add(course)
        self._drive()
        return courses

    def _copy_of(self, data: torch.Tensor, factor: float, owed: int) -> Shown:
        buffer = self._memory.take(data.nbytes, owed)
        room = buffer.memory[: data.nbytes]
        if factor == 1.0:
            self._streams.copy(room, as_bytes(data), Queue.WORK)
        else:
            with self._streams.working(Queue.WORK):
                torch.mul(data, factor, out=room.view(data.dtype).view(data.shape))
        return buffer

    def _shown(self, data: torch.Tensor, shown: Shown, peer: int, tag: int) -> Steps:
        """The tensor itself, which is kept until the peer has answered."""
        start = data.data_ptr() - data.untyped_storage().data_ptr()
        reading = self._lender.tell(peer, tag, shown, start, data.nbytes, buffer=False)
        yield None
        yield reading

    def _copied(self, buffer: Shown | None, size: int, peer: int, tag: int) -> Steps:
        reading = self._lender.tell(peer, tag, buffer, 0, size)
        yield None
        yield reading

    def _in_pieces(self, course: Leaving, flat: torch.Tensor, peer: int, tag: int) -> Steps:
        """Copies of pieces, with a few buffers in turn."""
        readings: deque[Reading] = deque()
        for first in range(0, flat.numel(), _PIECE):
            if len(readings) == _DEPTH:
                yield readings.popleft()
            piece = flat[first : first + _PIECE]
            buffer = self._copy_of(piece, 1.0, 1)
            last = first + _PIECE >= flat.numel()
            readings.append(self._lender.tell(peer, tag, buffer, 0, piece.numel(), last=last))
        course.copied = True
        yield None
        yield from readings


class Sent:
    """A copy that is done once it has been made, and its reading is queued.

    Args:
        lent: The copy.
        streams: Of the device.
    """

    def __init__(self, lent: Lent, streams: DeviceStreams) -> None:
        self._lent, self._streams = lent, streams
        self._made: Event | None = None

    def done(self) -> bool:
        """Whether it is."""
        if self._made is None and self._lent.free():
            self._made = self._streams.mark(Queue.WORK)
        return self._lent.done() and self._made is not None and self._made.done()

    def abandon(self) -> None:
        """The peer counts on it."""
        self._lent.abandon()


class Staged:
    """A tensor that goes through the host.

    Args:
        transfer: Its transfer.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.done, self.abandon = transfer.done, transfer.abandon

    def free(self) -> bool:
        """Whether it has left."""
        return self._transfer.done()
