"""The receiver's side of ``cuda_ipc``: open what a peer shows, and answer what reads it."""

from __future__ import annotations

from collections import OrderedDict

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.allocate import empty
from asyncddp.memory.streams import DeviceStreams, Event, InterprocessEvent, Queue
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_ipc_notes import Answer, Note, written

__all__ = ["Borrower"]

_MOST = 512  # pieces of memory that are kept open


class _Opened:
    """Memory of a peer that is mapped here.

    Attributes:
        memory: Its bytes.
        users: Notes about it that were not answered yet.
        read: After this event nothing reads it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.users = 0
        self.read: Event | None = None


class Borrower:
    """What one rank has opened of its peers'.

    Args:
        streams: Of the device.
        answers: A wire for answers.
    """

    def __init__(self, streams: DeviceStreams, answers: Transport) -> None:
        self._streams, self._answers = streams, answers
        self._opened: OrderedDict[tuple[int, int], _Opened] = OrderedDict()
        self._closing: list[_Opened] = []
        self._ready: dict[tuple[int, int], tuple[bytes, Event]] = {}
        self._taken: dict[tuple[int, int], InterprocessEvent] = {}
        self._leaving: list[Transfer] = []

    def __len__(self) -> int:
        """Pieces of memory that are open."""
        return len(self._opened) + len(self._closing)

    def take(self, peer: int, note: Note) -> torch.Tensor:
        """The bytes that a note names, where they lie; WORK waits until they can be read.

        Raises:
            PeerError: They cannot be seen from here.
        """
        try:
            source = self._bytes(peer, note)
            self._streams.after(Queue.WORK, self._ready_event(peer, note))
        except (RuntimeError, OSError) as error:
            raise PeerError(
                f"the memory that rank {peer} shows on its device cannot be opened: {error}. "
                "Leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
            ) from error
        for serial in note.retired:
            self._close((peer, serial))
        return source

    def answer(self, peer: int, tag: int, note: Note) -> None:
        """What reads the bytes of a note is queued on WORK."""
        key = peer, note.slot
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = self._streams.interprocess_event()
        taken.record(Queue.WORK)
        opened = self._opened.get((peer, note.serial))
        if opened is not None:
            opened.users, opened.read = opened.users - 1, taken
        message = written(Answer(note.slot, taken.handle))
        self._leaving.append(self._answers.isend(message, peer, tag))

    def drive(self) -> None:
        """Let answers leave, and let go of memory that nothing reads any more."""
        if self._leaving:
            self._leaving = [transfer for transfer in self._leaving if not _over(transfer)]
        if self._closing:
            with self._streams.working(Queue.IN):  # which has nothing to be waited for
                self._closing = [one for one in self._closing if not _read(one)]

    def close(self) -> None:
        """Let go of all that nothing reads any more."""
        for key in list(self._opened):
            self._close(key)
        self.drive()

    @property
    def busy(self) -> bool:
        """Whether answers have yet to leave, or something has yet to be read."""
        return bool(self._leaving) or not all(_read(one) for one in self._opened.values())

    def _bytes(self, peer: int, note: Note) -> torch.Tensor:
        if note.serial < 0:
            return empty((0,), torch.uint8, self._streams.device)
        key = peer, note.serial
        opened = self._opened.get(key)
        if opened is None:
            opened = self._opened[key] = _Opened(self._streams.borrow(note.token))
            self._make_room()
        self._opened.move_to_end(key)
        opened.users += 1
        return opened.memory[note.offset : note.offset + note.size]

    def _ready_event(self, peer: int, note: Note) -> Event:
        key = peer, note.slot
        handle, event = self._ready.get(key, (b"", None))
        if event is None or handle != note.ready:
            event = self._streams.imported_event(note.ready)
            self._ready[key] = note.ready, event
        return event

    def _make_room(self) -> None:
        """Close what was used longest ago, where too much is open."""
        for key in list(self._opened)[: max(0, len(self._opened) - _MOST)]:
            if not self._opened[key].users and self._opened[key].read is not None:
                self._close(key)

    def _close(self, key: tuple[int, int]) -> None:
        opened = self._opened.pop(key, None)
        if opened is not None:
            self._closing.append(opened)


def _read(opened: _Opened) -> bool:
    return opened.read is None or opened.read.done()


def _over(transfer: Transfer) -> bool:
    """Whether a transfer has ended, well or not."""
    try:
        return transfer.done()
    except PeerError:
        return True
