"""Persistent channels: ring buffers that all exchanges of one name, dtype and shape reuse.

The first exchange of a name goes by message: header, bytes, acknowledgement. In the second one a
rank offers a ring buffer to its peers on this machine. From the third one on, tensors of that name
and signature are read there, and a progress word replaces the header.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch

from asyncddp.engine.messages import ExchangeSignature, MatchKey, TensorMessage
from asyncddp.engine.tracing import NO_TRACING, EngineTracing
from asyncddp.errors import PeerError
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.shm.chunk_layout import ChunkLayout
from asyncddp.shm.memory_limit import memory_limit
from asyncddp.shm.ring_buffer import ReceiveRingBuffer, SendRingBuffer
from asyncddp.shm.slot_count_tuner import SlotCountTuner
from asyncddp.transport.base import SharedMemoryGroup

logger = logging.getLogger("asyncddp")

_MAX_RINGS = 2048
_MAX_RING_BYTES, _FEW_RING_BYTES = 1 << 30, 1 << 28  # of all send rings of this rank
_MEMORY_SHARE = 16  # send rings of a machine's ranks take so much of its memory, or the few bytes
_MAX_CHANNELS = 4096
_MAX_HISTORY = 256  # steps of a channel whose partners are remembered


class PersistentChannel:
    """Ring buffers to and from peers on this machine, for one name, dtype and shape of tensors."""

    def __init__(self, name: str, signature: ExchangeSignature, layout: ChunkLayout) -> None:
        self.name, self.signature, self.layout = name, signature, layout
        self.send_ring: SendRingBuffer | None = None  # of this rank's tensors, once offered
        self.readers: set[int] = set()  # ranks that have been told of the send ring
        self.receive_rings: dict[int, ReceiveRingBuffer] = {}  # the peers', by rank
        self.in_flight: deque[int] = deque()  # steps in progress here; the first one may go on
        self.deferred: deque[Any] = deque()  # handles of steps that no thread drives yet
        self.error: PeerError | None = None  # of a step that ended here before a peer refused it
        self._history: deque[tuple[int, Iterable[int], Iterable[int]]] = deque(maxlen=_MAX_HISTORY)

    def serves(self, sources: Iterable[int], targets: Collection[int]) -> bool:
        """Return whether ring buffers from all sources and to all targets are set up."""
        for peer in sources:
            if peer not in self.receive_rings:
                return False
        return not targets or (self.send_ring is not None and self.readers.issuperset(targets))

    def record(self, step: int, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Record the sources and targets of a step."""
        self._history.append((step, sources, targets))

    def partners(self, step: int) -> tuple[frozenset[int], frozenset[int]] | None:
        """Return the recorded sources and targets of a step, or None."""
        for known, sources, targets in list(self._history):
            if known == step:
                return frozenset(sources), frozenset(targets)
        return None


class PersistentChannelTable:
    """Table of one rank's persistent channels, by the name, dtype and shape of exchanges.

    ``shared_memory_group`` contains the ranks with which it shares memory. ``late_error`` is the
    error of an exchange that had ended on this rank before; the next operation raises it.
    """

    def __init__(
        self,
        shared_memory_group: SharedMemoryGroup | None,
        rank: int,
        tracing: EngineTracing = NO_TRACING,
    ) -> None:
        self._group, self._rank, self.tracing = shared_memory_group, rank, tracing
        self._ranks = shared_memory_group.ranks if shared_memory_group else ()
        self._lock = threading.Lock()
        self._by_name: dict[str, dict[ExchangeSignature, PersistentChannel]] = {}
        self._channels = self._rings = self._bytes = 0
        self._memory_share = _FEW_RING_BYTES
        if self._ranks:
            share = memory_limit() // (_MEMORY_SHARE * len(self._ranks))
            self._memory_share = max(_FEW_RING_BYTES, share)
        self._is_full = False  # as the log has been told
        self.slot_count_tuner = SlotCountTuner()
        self.late_error: PeerError | None = None

    def find_or_open(
        self, key: MatchKey, signature: ExchangeSignature, targets: Collection[int]
    ) -> PersistentChannel | None:
        """Return the channel of a name and signature, opened in the second use; None before.

        Without targets, as for a peer's ring buffer, the number of channels is not limited.
        """
        group = self._group
        channel = self._by_name.get(key.name, {}).get(signature)
        if channel is None:
            if group is None or key.step < 1 or key.collective or None in signature.shape:
                return None
            if signature.device != "cpu" or (targets and self._channels >= _MAX_CHANNELS):
                return None
            shape = tuple(size or 0 for size in signature.shape)
            layout = ChunkLayout.of(shape, getattr(torch, signature.dtype))
            if layout.numel * layout.dtype.itemsize > group.largest:
                return None
            channel = PersistentChannel(key.name, signature, layout)
            with self._lock:
                self._by_name.setdefault(key.name, {})[signature] = channel
                self._channels += 1
        here = () if group is None else group.processes
        if channel.send_ring is None and any(target in here for target in targets):
            channel.send_ring = self._allocate_ring(channel)
        return channel

    def get(self, name: str, signature: ExchangeSignature) -> PersistentChannel | None:
        """Return the channel of a name and signature; None if there is none."""
        return self._by_name.get(name, {}).get(signature)

    def _allocate_ring(self, channel: PersistentChannel) -> SendRingBuffer | None:
        layout = channel.layout
        size = SendRingBuffer.nbytes(len(self._ranks), layout)
        if self._group is None or not layout.numel:
            return None
        most = min(_MAX_RING_BYTES, self._memory_share)
        if self._rings >= _MAX_RINGS or self._bytes + size > most:
            self._tell_of_end(channel.name)
            return None
        make_ring = self.tracing.send_ring(channel.signature.verb, channel.name)
        try:
            send_ring = make_ring(self._group.arena, self._ranks, layout, self.slot_count_tuner)
        except OSError:
            return None
        send_ring.notify_readers_by(self._group.notify)
        self._rings, self._bytes = self._rings + 1, self._bytes + size
        return send_ring

    def _tell_of_end(self, name: str) -> None:
        """Log a warning, once, that further names get no ring buffers."""
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "rank %d: %d names of tensors have ring buffers, of %.0f MB; %r and later ones go "
                "by message, which is slower: use names again, or average a list in one call",
                self._rank,
                self._rings,
                self._bytes / 1e6,
                name,
            )

    def ring_to_offer(
        self, channel: PersistentChannel | None, peer: int
    ) -> SharedMemoryHandle | None:
        """Return the send ring's handle for a peer that can map it and was not sent it yet."""
        if channel is None or channel.send_ring is None or not channel.send_ring.reaches(peer):
            return None
        return None if peer in channel.readers else channel.send_ring.handle

    def attach_ring(
        self, channel: PersistentChannel, peer: int, handle: SharedMemoryHandle
    ) -> None:
        """Map the ring buffer that a peer has offered, to receive through it."""
        if self._group is not None:
            view = self._group.arena.open(self._group.processes[peer], handle)
            make_ring = self.tracing.receive_ring(channel.signature.verb, channel.name, peer)
            receive_ring = make_ring(view, handle.offset, self._ranks, self._rank, channel.layout)
            if self._group.notify is not None:
                receive_ring.notify_sender_by(partial(self._group.notify, peer))
            channel.receive_rings[peer] = receive_ring

    def handle_of(self, tensor: torch.Tensor) -> SharedMemoryHandle | None:
        """Return a tensor's shared-memory handle; None if its memory is not shared."""
        return None if self._group is None else self._group.arena.locate(tensor)

    def map_tensor(
        self, peer: int, channel: PersistentChannel, handle: SharedMemoryHandle
    ) -> torch.Tensor:
        """Map a peer's tensor by its shared-memory handle; return it as a flat tensor."""
        if self._group is None:
            raise RuntimeError("there is no shared memory")
        view = self._group.arena.open(self._group.processes[peer], handle)
        return view.tensor(handle.offset, (channel.layout.numel,), channel.layout.dtype)

    def leave_out(self, peer: int) -> None:
        """Wait no longer until a peer that has left has read from this rank's ring buffers."""
        for channel in self._all():
            channel.readers.discard(peer)
            if channel.send_ring is not None and channel.send_ring.reaches(peer):
                channel.send_ring.release_reader(peer)

    def readmit(self, peer: int) -> None:
        """Offer ring buffers to a peer again, which has a new process."""
        for channel in self._all():
            channel.receive_rings.pop(peer, None)
            channel.readers.discard(peer)
            if channel.send_ring is not None and channel.send_ring.reaches(peer):
                channel.send_ring.admit_reader(peer)

    def retire_ring(self, channel: PersistentChannel) -> None:
        """Drop the send ring after a failed exchange; the next one offers a new ring."""
        channel.send_ring = None
        channel.readers.clear()

    def find_all(self, name: str) -> list[PersistentChannel]:
        """Return all channels of a name."""
        return list(self._by_name.get(name, {}).values())

    def partners(self, key: MatchKey) -> tuple[frozenset[int], frozenset[int]] | None:
        """Return the recorded sources and targets of a use of a name, or None."""
        return next(filter(None, (one.partners(key.step) for one in self.find_all(key.name))), None)

    def is_in_flight(self, key: MatchKey) -> bool:
        """Return whether a use of a name is in progress in any channel."""
        return any(key.step in list(channel.in_flight) for channel in self.find_all(key.name))

    def fail_next_call(self, error: PeerError) -> None:
        """Store an error for the next operation to raise, unless one is stored already."""
        self.late_error = self.late_error or error

    def raise_late_error(self) -> None:
        """Raise the error stored for the next operation, if there is one, and discard it."""
        error = self.late_error
        if error is not None:
            self.discard_error(error)
            raise error

    def discard_error(self, error: PeerError) -> None:
        """Discard a stored error, so that it is not raised again."""
        if self.late_error is error:
            self.late_error = None
        for channel in self._all():
            if channel.error is error:
                channel.error = None

    def unexpected_tensors(self) -> list[tuple[int, TensorMessage]]:
        """List unread tensors in the receive rings of this rank, in the form of messages."""
        found = []
        for channel in self._all():
            form = channel.signature
            shape = tuple(size or 0 for size in form.shape)
            for peer, receive_ring in list(channel.receive_rings.items()):
                for step in receive_ring.unread_steps():
                    key = MatchKey(channel.name, step)
                    message = TensorMessage(
                        key, form.verb, form.dtype, shape, b"", -1, members=form.members
                    )
                    found.append((peer, message))
        return found

    def _all(self) -> list[PersistentChannel]:
        with self._lock:
            return [one for named in self._by_name.values() for one in named.values()]
