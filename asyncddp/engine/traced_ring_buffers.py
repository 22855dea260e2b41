"""Traced ring buffers: ring buffers that record the tensors sent through them in the timeline.

Where a timeline is written, they are created in place of the plain ones.
"""

from __future__ import annotations

import time

import torch

from asyncddp.shm.arena import Arena, MappedChunk, SharedMemoryHandle
from asyncddp.shm.ring_buffer import ChunkLayout, ReceiveRingBuffer, SendRingBuffer
from asyncddp.timeline.tracer import Tracer


class TracedSendRingBuffer(SendRingBuffer):
    """Send ring buffer that records each tensor sent through it in the timeline.

    Args:
        tracer: The timeline's tracer.
        verb: The verb that exchanges through the ring.
        name: The name under which it does so.
        arena: The shared memory; this and what follows are as for :class:`SendRingBuffer`.
        ranks: The ranks of the machine.
        layout: How its tensors are split into chunks.
    """

    def __init__(
        self,
        tracer: Tracer,
        verb: str,
        name: str,
        arena: Arena,
        ranks: tuple[int, ...],
        layout: ChunkLayout,
    ) -> None:
        super().__init__(arena, ranks, layout)
        self._tracer, self._verb, self._name = tracer, verb, name
        self._nbytes = layout.numel * layout.dtype.itemsize
        self._begun: dict[int, tuple[int, tuple[int, ...]]] = {}

    def begin(
        self, step: int, targets: tuple[int, ...], handle: SharedMemoryHandle | None = None
    ) -> None:
        """Announce a step, and remember when it began and for which ranks."""
        self._begun[step & 1] = time.monotonic_ns(), targets
        super().begin(step, targets, handle)

    def try_send(self, step: int, targets: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Send a tensor of one chunk if there is room, and record the transfer."""
        begun = time.monotonic_ns()
        sent = super().try_send(step, targets, tensor)
        if sent:
            self._begun[step & 1] = begun, targets
            self._record(step)
        return sent

    def publish(self, step: int, chunks: int) -> None:
        """Publish chunks of a step; with the last one, record the transfer."""
        super().publish(step, chunks)
        if chunks == self.layout.num_chunks:
            self._record(step)

    def _record(self, step: int) -> None:
        begun, targets = self._begun[step & 1]
        now = time.monotonic_ns()
        for target in targets:
            self._tracer.record_transfer(
                "send", self._verb, self._name, target, self._nbytes, begun, now, step
            )


class TracedReceiveRingBuffer(ReceiveRingBuffer):
    """Receive ring buffer that records each tensor read from it in the timeline.

    Args:
        tracer: The timeline's tracer.
        peer: The sender.
        verb: The verb that exchanges through the ring.
        name: The name under which it does so.
        view: The peer's memory; this and what follows are as for :class:`ReceiveRingBuffer`.
        offset: Where in it the ring begins.
        ranks: The ranks of the machine.
        rank: This rank.
        layout: How its tensors are split into chunks.

    Attributes:
        last_read: The step that was read last, when that began, and when it was over.
    """

    def __init__(
        self,
        tracer: Tracer,
        peer: int,
        verb: str,
        name: str,
        view: MappedChunk,
        offset: int,
        ranks: tuple[int, ...],
        rank: int,
        layout: ChunkLayout,
    ) -> None:
        super().__init__(view, offset, ranks, rank, layout)
        self._tracer, self._peer, self._verb, self._name = tracer, peer, verb, name
        self._nbytes = layout.numel * layout.dtype.itemsize
        self._begun: dict[int, int] = {}
        self.last_read = (-1, 0, 0)

    def read_whole(self, step: int) -> torch.Tensor | None:
        """Return a one-chunk tensor if it is published, and note when its reading began."""
        found = super().read_whole(step)
        if found is not None:
            self._begun.setdefault(step, time.monotonic_ns())
        return found

    def tensor_handle(self, step: int) -> SharedMemoryHandle | None:
        """Return a handle to the tensor of a step, and note that its reading begins."""
        self._begun.setdefault(step, time.monotonic_ns())
        return super().tensor_handle(step)

    def read_begun(self, step: int) -> int:
        """Return when the unfinished reading of a step began; the present time if it has not."""
        return self._begun.get(step, time.monotonic_ns())

    def acknowledge(self, step: int, chunks: int) -> None:
        """Acknowledge chunks of a step; with the last one, record the transfer."""
        over = chunks == self.layout.num_chunks
        begun = self._begun.pop(step, None) if over else None
        if begun is not None and self.published(step) == chunks:  # a failed peer publishes fewer
            now = time.monotonic_ns()
            self.last_read = step, begun, now
            self._tracer.record_transfer(
                "read", self._verb, self._name, self._peer, self._nbytes, begun, now, step
            )
        super().acknowledge(step, chunks)
