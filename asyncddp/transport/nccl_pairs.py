"""Messages by NCCL: a communicator for every two ranks that talk, opened when first needed.

NCCL's send and receive match by their order, and ours by peer and tag in any order. So the two
ranks of a pair agree by notes what both enter next: see :mod:`~asyncddp.transport.nccl_notes`.
What is ready on both sides goes in one group, both ways at a time.

**Why no circle of waiting ranks can come about.** A kernel of NCCL occupies its GPU until its peer
has joined it, and NCCL warns of several communicators at once: a kernel that finds no room on a
GPU could hold up the very rank that others wait for. Here

- the host never waits: opening a communicator and its first exchange, in which NCCL connects the
  two ranks, are made on a thread of their own, and each rank enters a batch as soon as it hears of
  it, whatever else is under way;
- every pair has a stream to itself, so that no batch waits behind another pair's;
- the kernels of all pairs fit on the GPU at once, whatever else comes: messages take at most
  ``NCCL_MAX_P2P_NCHANNELS`` channels (8 unless set), a channel takes one multiprocessor, and a
  rank opens no more communicators than fill half of them. What goes to further peers is staged.

What remains: a call of CUDA inside NCCL's opening may wait for the device; and with
``NCCL_LAUNCH_ORDER_IMPLICIT=1`` NCCL itself puts communicators in the order of each rank's host.
Then messages pass their deadline, and say so.

References:
    NCCL's documentation, "Point-to-point communication" and "Using multiple NCCL communicators
    concurrently".
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams, Queue
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.nccl_communicator import run_apart
from asyncddp.transport.nccl_library import CHANNELS, Library
from asyncddp.transport.nccl_notes import Note, read, written
from asyncddp.transport.nccl_pair import Pair
from asyncddp.transport.nccl_sides import Follower, Leader

__all__ = ["Pairs", "Room"]

_ROOM = 8  # communicators where it is not known how large a GPU is


class Room:
    """How many more communicators for messages a device has room for.

    Args:
        left: How many.

    Example:
        >>> room = Room(1)
        >>> room.take(), room.take()
        (True, False)
    """

    def __init__(self, left: int) -> None:
        self._left = left

    @classmethod
    def of(cls, device: torch.device) -> Room:
        """Room for as many as take half of the multiprocessors of a device; one at least."""
        if device.type != "cuda":
            return cls(_ROOM)
        text = os.environ.get("NCCL_MAX_P2P_NCHANNELS", "")
        channels = int(text) if text.isdecimal() and int(text) > 0 else CHANNELS
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(max(1, processors // (2 * channels)))

    def take(self) -> bool:
        """Take one, if there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give(self) -> None:
        """Give one back."""
        self._left += 1


class Pairs:
    """All pairs of one rank.

    Args:
        rank: This rank.
        streams: Of the device.
        library: cupy.
        notes: A wire of its own between the ranks.
        room: For communicators.
        stage: Carries a message through the host: takes the bytes, the peer, the tag and whether
            it is a send.
    """

    def __init__(
        self,
        rank: int,
        streams: DeviceStreams,
        library: Library,
        notes: Transport,
        room: Room,
        stage: Callable[[torch.Tensor, int, int, bool], Transfer],
    ) -> None:
        self.rank, self.streams, self.library = rank, streams, library
        self._notes, self._room, self._stage = notes, room, stage
        self._pairs: dict[int, Pair] = {}
        self._closed = False

    def begin(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Transfer:
        """Begin a send or a receive.

        Raises:
            PeerError: Messages with this peer cannot go on.
        """
        ready = self.streams.mark(Queue.WORK)
        return self._with(peer).begin(as_bytes(data), tag, ready, sends=sends)

    def _with(self, peer: int) -> Pair:
        if peer not in self._pairs:
            side = Leader if self.rank < peer else Follower
            self._pairs[peer] = side(self, peer)
        return self._pairs[peer]

    def drive(self) -> None:
        """Take all notes, and move all pairs on."""
        if self._closed:
            return
        for peer, note in self._notes.poll():
            pair = self._with(peer)
            try:
                pair.hear(read(note, peer))
            except PeerError as problem:
                pair.break_off(f"rank {self.rank}: {problem}")
        for pair in self._pairs.values():
            pair.move()

    def tell(self, peer: int, note: Note) -> None:
        """Send a note."""
        if not self._closed:
            self._notes.post(peer, written(note))

    def take_room(self) -> bool:
        """Whether there is room for one more communicator, which is then taken."""
        return self._room.take()

    def give_room(self) -> None:
        """Give room back."""
        self._room.give()

    def stage(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Transfer:
        """Carry a message through the host."""
        return self._stage(data, peer, tag, sends)

    def close(self) -> None:
        """Give all communicators back; waits two seconds at most."""
        if self._closed:
            return
        self._closed = True
        endings = [pair.ending() for pair in self._pairs.values()]
        run_apart([end for end in endings if end is not None])
        self._notes.close()
