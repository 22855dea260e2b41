"""The sender's side of ``cuda_ipc``: tell a peer what it can read, and hear when it does."""

from __future__ import annotations

from collections import defaultdict

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams, Queue
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_ipc_memory import Memory, Shown, Slot
from asyncddp.transport.cuda_ipc_notes import ANSWER, MOST_WORDS, Answer, Note, blank, read, written

__all__ = ["Lender", "Reading"]


class Reading:
    """Some bytes that a peer was told of; done once it has queued what reads them.

    Args:
        peer: The peer.
        slot: Their events.
        sending: The note.
        answer: The answer.
        paper: On which it comes.
        buffer: The buffer that they are in; None where they are in the user's tensor.
    """

    def __init__(
        self,
        peer: int,
        slot: Slot,
        sending: Transfer,
        answer: Transfer,
        paper: torch.Tensor,
        buffer: Shown | None,
    ) -> None:
        self.peer, self.slot, self.paper, self.buffer = peer, slot, paper, buffer
        self._sending, self._answer = sending, answer
        self.over = False
        self.problem: PeerError | None = None

    def heard(self) -> bool:
        """Whether the answer has come since, or never will."""
        try:
            self.over = all([self._sending.done(), self._answer.done()])
        except PeerError as problem:
            self.problem, self.over = problem, True
        return self.over

    def done(self) -> bool:
        """Whether the answer has been taken."""
        if self.problem is not None:
            raise self.problem
        return self.over


class Lender:
    """All that one rank has told its peers, until they answer.

    Args:
        streams: Of the device.
        memory: What it shows.
        notes: A wire for notes.
        answers: Another one for answers.
    """

    def __init__(
        self, streams: DeviceStreams, memory: Memory, notes: Transport, answers: Transport
    ) -> None:
        self._streams, self._memory = streams, memory
        self._notes, self._answers = notes, answers
        self._slots: dict[int, list[Slot]] = defaultdict(list)
        self._made: list[Slot] = []
        self._readings: list[Reading] = []

    @property
    def busy(self) -> bool:
        """Whether peers have yet to answer, or to read."""
        read = all(slot.taken is None or slot.taken.done() for slot in self._made)
        return bool(self._readings) or not read

    def tell(
        self,
        peer: int,
        tag: int,
        shown: Shown | None,
        offset: int,
        size: int,
        *,
        last: bool = True,
        buffer: bool = True,
    ) -> Reading:
        """Tell a peer of bytes that it can read once WORK has come so far.

        Args:
            peer: The peer.
            tag: Of the tensor.
            shown: The memory; None for no bytes.
            offset: Where in it they begin.
            size: How many there are.
            last: Whether the tensor ends with them.
            buffer: Whether the memory is a buffer, used again once the peer has read.
        """
        slot = self._slot(peer)
        slot.ready.record(Queue.WORK)
        token = b"" if shown is None else shown.token(peer, self._streams)
        words = self._memory.retired[peer]
        retired = tuple(words[:MOST_WORDS])
        del words[:MOST_WORDS]
        serial = -1 if shown is None else shown.serial
        note = Note(slot.number, slot.ready.handle, serial, token, offset, size, last, retired)
        paper = blank(ANSWER)
        answer = self._answers.irecv(paper, peer, tag)
        sending = self._notes.isend(written(note), peer, tag)
        reading = Reading(peer, slot, sending, answer, paper, shown if buffer else None)
        self._readings.append(reading)
        return reading

    def drive(self) -> None:
        """Take the answers that have come."""
        heard = [reading for reading in self._readings if reading.heard()]
        if not heard:
            return
        self._readings = [reading for reading in self._readings if not reading.over]
        for reading in heard:
            if reading.problem is None:
                try:
                    self._take(reading)
                except (RuntimeError, OSError) as error:
                    reading.problem = PeerError(
                        f"the event after which rank {reading.peer} has read cannot be opened: "
                        f"{error}. Leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
                    )

    def _take(self, reading: Reading) -> None:
        slot, answer = reading.slot, read(reading.paper, Answer, reading.peer)
        if slot.taken is None or slot.handle != answer.taken:
            slot.taken, slot.handle = self._streams.imported_event(answer.taken), answer.taken
        if reading.buffer is None:
            slot.free(self._streams)
        else:
            self._memory.answered(reading.buffer, slot)

    def _slot(self, peer: int) -> Slot:
        free = self._slots[peer]
        if free:
            return free.pop()
        slot = Slot(len(self._made), self._streams.interprocess_event(), free)
        self._made.append(slot)
        return slot
