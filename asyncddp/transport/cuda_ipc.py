"""``cuda_ipc``: between processes on one machine, straight out of the peer's GPU memory.

The sender shows its tensor, or a copy in a buffer of its own where the tensor will be written
meanwhile. It records an event on its stream and sends a note of both. The receiver lets its stream
wait for that event, queues what reads the memory where it lies, records an event of its own behind
it, and answers; the sender lets its stream wait for that one before the memory is used again. No
side ever asks whether its GPU has come so far, and nothing but notes goes through the host.
Messages to GPUs out of reach, and collectives, are left to other wires, or staged. Not run on a GPU
yet; tests run it between processes with memory of the host that both have mapped.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams, Queue
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_ipc_borrower import Borrower
from asyncddp.transport.cuda_ipc_courses import Courses
from asyncddp.transport.cuda_ipc_lender import Lender
from asyncddp.transport.cuda_ipc_memory import Memory
from asyncddp.transport.cuda_ipc_receiving import Receiving
from asyncddp.transport.cuda_ipc_sending import WHOLE, Sending, Sent, Staged
from asyncddp.transport.lending import Lending, Lent, Loan
from asyncddp.transport.per_peer import PerPeer

__all__ = ["CudaIPC"]

_LIMIT = 1 << 28  # bytes of free buffers that are kept on the GPU
_FAREWELL = 1.0  # seconds for peers to read what they were shown


class CudaIPC(PerPeer, Lending):
    """A wire for tensors on GPUs that reads them where they lie, where a peer's GPU is in reach.

    Args:
        base: The wire for tensors on the host, between the same ranks.
        streams: Of the device.
        near: Ranks on this machine whose GPU this one reads, and which read this one's.
        notes: A wire of its own between the same ranks, for what the receiver is told.
        answers: Another one, for what the sender is told.

    References:
        CUDA C++ Programming Guide, "Interprocess Communication"; CUDA samples, ``simpleIPC``, whose
        events order streams of several processes as here; torch's ``torch.multiprocessing``,
        "Sharing CUDA tensors".
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
        self._courses, self._closed = Courses(), False
        self.memory = Memory(streams, _LIMIT)
        self._lender = Lender(streams, self.memory, notes, answers)
        self._borrower = Borrower(streams, answers)
        drive = self._drive_courses
        self._sending = Sending(streams, self.memory, self._lender, self._courses, drive)
        self._receiving = Receiving(streams, self._borrower, notes, self._courses, drive)

    @classmethod
    def open(cls, base: Transport, streams: DeviceStreams, near: Collection[int]) -> CudaIPC:
        """Make the wire, with two more beneath it; collective.

        Args:
            base: The wire for tensors on the host.
            streams: Of the device.
            near: Ranks whose GPUs are in reach.
        """
        return cls(base, streams, near, base.split(0, base.rank), base.split(0, base.rank))

    # what goes

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Show the peer a copy; done once that has been made and what reads it is queued."""
        if peer not in self._near:
            return super().isend(data, peer, tag)
        return Sent(self.ilend(data, {peer: tag})[peer], self.streams)

    def ilend(
        self,
        data: torch.Tensor,
        tags: Mapping[int, int],
        *,
        factor: float = 1.0,
        lasting: bool = False,
    ) -> dict[int, Lent]:
        """Show a tensor to peers, and send it to those out of reach."""
        near = {peer: tag for peer, tag in tags.items() if peer in self._near}
        far = {peer: tag for peer, tag in tags.items() if peer not in self._near}
        if factor != 1.0 and (far or data.nbytes > WHOLE):
            with self.streams.working(Queue.WORK):
                data, factor = data * factor, 1.0
            lasting = False
        lent: dict[int, Lent] = {}
        for peer, tag in far.items():
            lent[peer] = Staged(super().isend(data, peer, tag))
        if near:
            lent |= self._sending.lend(data, near, factor, lasting=lasting)
        return lent

    # what comes

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Copy what the peer shows; done once that has been copied."""
        if peer not in self._near:
            return super().irecv(out, peer, tag)
        return self._receiving.copy(out, peer, tag)

    def iborrow(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Look at what the peer shows, or receive it from one out of reach."""
        irecv = super().irecv
        through = None if peer in self._near else lambda out: irecv(out, peer, tag)
        return self._receiving.borrow(shape, dtype, peer, tag, through)

    # all of them

    def _drive_courses(self) -> None:
        self._lender.drive()
        self._borrower.drive()
        self._courses.move()

    def close(self) -> None:
        """Let peers read what they were shown, for a second at most, and close what is beneath."""
        if not self._closed:
            self._closed = True
            with suppress(PeerError):  # a peer that is gone reads nothing
                self._part()
            self._courses.clear()
            self._borrower.close()
            if not self._lender.busy:
                self.memory.close()
            self._notes.close()
            self._answers.close()
        super().close()

    def _part(self) -> None:
        """Keep memory and events until the peers are through with them."""
        missing, attempt, deadline = set(self._near), 0, time.monotonic() + _FAREWELL
        for peer in self._near:
            self._notes.post(peer, b"")
        while time.monotonic() < deadline:
            self._drive_courses()
            missing -= {peer for peer, _ in self._notes.poll()}
            if not (missing or self._lender.busy or self._borrower.busy):
                return
            self.base.rest(attempt)
            attempt += 1
