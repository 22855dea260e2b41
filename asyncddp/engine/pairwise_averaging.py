"""Pairwise averaging of a tensor with one peer, by polling ring buffers in shared memory.

Polling for the peer is fastest while both ranks make progress. If one does not, the averaging
stops, and the engine continues it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from asyncddp.shm.arena import SharedMemoryHandle, store_fence
from asyncddp.shm.ring_buffer import ReceiveRingBuffer, SendRingBuffer, pack_progress, unpack_chunks

_TIMEOUT = 0.0002  # seconds for a peer to begin
_CHUNK_TIMEOUT = 0.005  # seconds for one that has begun to finish its next chunk
_POLLS = 50  # polls between two readings of the clock
Pause: TypeAlias = Callable[[], None]


def poll_briefly(check: Callable[[], bool], pause: Pause | None, timeout: float = _TIMEOUT) -> bool:
    """Poll a condition for at most ``timeout`` seconds; return whether it has become true."""
    limit = 0.0
    while True:
        for _ in range(_POLLS):
            if check():
                return True
            if pause is not None:
                pause()
        now = time.perf_counter()
        if limit and now > limit:
            return False
        limit = limit or now + timeout


def _poll_word(words: memoryview, index: int, goal: int, pause: Pause | None) -> bool:
    """Poll briefly until a header word reaches a goal; longer after the first chunk."""
    timeout = _CHUNK_TIMEOUT if unpack_chunks(goal) > 1 else _TIMEOUT
    return words[index] >= goal or poll_briefly(lambda: words[index] >= goal, pause, timeout)


class PairwiseAveraging:
    """Weighted average of this rank's tensor and one peer's, by polling shared memory for chunks.

    It is :math:`x + w (x_p - x)`, with x this rank's tensor and w the weight of the peer's,
    :math:`x_p`.
    ``targets`` read this rank's send ring, which is None if there are none. ``pause`` is called
    between two polls, if there are fewer cores than ranks. ``chunks_sent`` counts this rank's
    published chunks, ``chunks_read`` the averaged chunks of the peer.
    """

    def __init__(
        self,
        send_ring: SendRingBuffer | None,
        receive_ring: ReceiveRingBuffer,
        step: int,
        targets: tuple[int, ...],
        pause: Pause | None,
    ) -> None:
        self._send_ring, self._receive_ring, self._step = send_ring, receive_ring, step
        self._targets, self._pause = targets, pause
        self.chunks_sent = self.chunks_read = 0

    def begin(self, handle: SharedMemoryHandle | None) -> bool:
        """Begin to send this rank's tensor, in slots or by handle; False if there is no room."""
        send_ring, step = self._send_ring, self._step
        if send_ring is None:
            return True
        if not send_ring.has_room(step) and not poll_briefly(
            lambda: send_ring.has_room(step), self._pause
        ):
            return False
        send_ring.begin(step, self._targets, handle)
        if handle is not None:
            self.chunks_sent = send_ring.layout.num_chunks
            send_ring.publish(step, self.chunks_sent)
        return True

    def peer_handle(self) -> SharedMemoryHandle | None:
        """Return the handle of the peer's tensor; None if it is in slots, or not published soon."""
        receive_ring, line = self._receive_ring, 8 * (self._step & 1)
        if _poll_word(receive_ring.words, line, pack_progress(self._step, 1), self._pause):
            store_fence()
            if receive_ring.is_addressed(self._step):
                return receive_ring.tensor_handle(self._step)
        return None

    def average_mapped(
        self, own: torch.Tensor, other: torch.Tensor, out: torch.Tensor, weight: float
    ) -> bool:
        """Average with the peer's tensor in its own memory; True if all peers have read ours."""
        chunks, send_ring = self._receive_ring.layout.num_chunks, self._send_ring
        torch.lerp(own, other, weight, out=out)
        self._receive_ring.acknowledge(self._step, chunks)
        self.chunks_read = chunks
        return send_ring is None or self._read_by_all(send_ring, chunks)

    def _read_by_all(self, send_ring: SendRingBuffer, chunks: int) -> bool:
        """Wait briefly for all targets to read ``chunks`` chunks; return whether they did."""
        step = self._step
        return not send_ring.pending_readers(step, chunks) or poll_briefly(
            lambda: not send_ring.pending_readers(step, chunks), self._pause, _CHUNK_TIMEOUT
        )

    def average_chunks(
        self, own: Sequence[torch.Tensor], out: Sequence[torch.Tensor], weight: float
    ) -> bool:
        """Average chunk by chunk, through slots; return whether all chunks were averaged.

        Otherwise, ``chunks_sent`` and ``chunks_read`` count the chunks done so far.
        """
        send_ring, receive_ring, number = self._send_ring, self._receive_ring, len(own)
        line, base = 8 * (self._step & 1), pack_progress(self._step, 0)
        ahead = 1
        for read in range(number):
            while self.chunks_sent < number and self.chunks_sent <= read + ahead:
                if send_ring is not None and not self._send_chunk(send_ring, own[self.chunks_sent]):
                    if self.chunks_sent <= read:
                        return False
                    break
                self.chunks_sent += 1
            if not _poll_word(receive_ring.words, line, base | read + 1, self._pause):
                return False
            store_fence()
            if read == 0 and not self._reads_slots():
                return False
            other = receive_ring.slot(self._step, read)
            torch.lerp(own[read], other, weight, out=out[read])
            receive_ring.acknowledge(self._step, read + 1)
            self.chunks_read = read + 1
        return True

    def _reads_slots(self) -> bool:
        """Return whether the peer has published this step for this rank, in its slots."""
        receive_ring, step = self._receive_ring, self._step
        return (
            receive_ring.published(step) > 0
            and receive_ring.is_addressed(step)
            and receive_ring.tensor_handle(step) is None
        )

    def _send_chunk(self, send_ring: SendRingBuffer, chunk: torch.Tensor) -> bool:
        """Send the next chunk if its slot is free in time; return whether it was sent."""
        number = self.chunks_sent
        before = number - send_ring.cycle  # the chunk that the slot held
        if before >= 0 and not self._read_by_all(send_ring, before + 1):
            return False
        send_ring.send_chunk(self._step, number, chunk)
        return True
