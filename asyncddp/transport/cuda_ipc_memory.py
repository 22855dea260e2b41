"""Memory that ``cuda_ipc`` shows to peers: buffers of its own, and what its user sends again."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncddp.memory.streams import DeviceStreams, Event, InterprocessEvent, Queue

__all__ = ["Memory", "Shown", "Slot"]

logger = logging.getLogger("asyncddp")

_LEAST = 1 << 12  # bytes of a buffer


class Slot:
    """Two events of one piece of memory that is lent to one peer, used one time after the other.

    Neither is recorded again before the other side has let a stream wait for it: ours not before
    the answer, the peer's not before the next note of this slot, which comes after :meth:`free`.

    Args:
        number: What the peer knows it by.
        ready: Ours, after which the memory can be read.
        home: Where it waits to be used again.

    Attributes:
        taken: The peer's, after which the memory has been read; None before the first answer.
        handle: Its handle.
    """

    def __init__(self, number: int, ready: InterprocessEvent, home: list[Slot]) -> None:
        self.number, self.ready, self._home = number, ready, home
        self.taken: Event | None = None
        self.handle = b""

    def free(self, streams: DeviceStreams) -> None:
        """Let WORK wait until the peer has read, which ends this use of it."""
        if self.taken is not None:
            streams.after(Queue.WORK, self.taken)
        self._home.append(self)


class Shown:
    """Memory that peers can be shown.

    Args:
        memory: Its bytes, all of a storage.
        serial: What peers know it by.

    Attributes:
        tokens: Where it is, for each peer that was told.
        readers: Uses of it that were answered and for which WORK has not waited yet.
        owed: Answers that are to come.
    """

    def __init__(self, memory: torch.Tensor, serial: int) -> None:
        self.memory, self.serial = memory, serial
        self.tokens: dict[int, bytes] = {}
        self.readers: list[Slot] = []
        self.owed = 0

    def token(self, peer: int, streams: DeviceStreams) -> bytes:
        """Where it is, for one peer.

        Raises:
            RuntimeError: It cannot be shown.
        """
        if peer not in self.tokens:
            self.tokens[peer] = streams.lend(self.memory)
        return self.tokens[peer]


class _Storage(NamedTuple):
    """A storage that was sent.

    Attributes:
        weak: Tells whether it is still there.
        place: Its address and size.
        shown: How peers see it; None where they cannot, or need not yet.
        hopeless: Whether it cannot be shown.
    """

    weak: StorageWeakRef
    place: tuple[int, int]
    shown: Shown | None = None
    hopeless: bool = False


class Memory:
    """All that one rank shows.

    Args:
        streams: Of the device.
        limit: Bytes of free buffers that are kept at most.

    Attributes:
        made: Buffers that were made so far.
        retired: Serial numbers that each peer has yet to be told not to come again.
    """

    def __init__(self, streams: DeviceStreams, limit: int) -> None:
        self._streams, self._limit = streams, limit
        self._serials = itertools.count()
        self._free: dict[int, deque[Shown]] = defaultdict(deque)
        self._waiting = 0
        self._storages: dict[int, _Storage] = {}
        self.made = 0
        self.retired: dict[int, list[int]] = defaultdict(list)

    def take(self, size: int, owed: int) -> Shown:
        """A buffer of at least so many bytes, which WORK may write.

        Free buffers are used in turn, so that a peer has had time to read what was in them.

        Args:
            size: Bytes.
            owed: Answers after which it is free again.
        """
        room = max(_LEAST, 1 << max(0, size - 1).bit_length())
        free = self._free[room]
        if free:
            buffer = free.popleft()
            self._waiting -= room
            self._settle(buffer)
        else:
            buffer = Shown(self._streams.lendable(room), next(self._serials))
            self.made += 1
        buffer.owed = owed
        return buffer

    def answered(self, buffer: Shown, slot: Slot) -> None:
        """One of the peers has queued what reads a buffer."""
        buffer.readers.append(slot)
        buffer.owed -= 1
        if buffer.owed:
            return
        room = buffer.memory.nbytes
        if self._waiting + room <= self._limit:
            self._free[room].append(buffer)
            self._waiting += room
        else:
            self._settle(buffer)
            self._retire(buffer)

    def sent_before(self, data: torch.Tensor, peers: Collection[int]) -> Shown | None:
        """The storage of a tensor, if it was sent before and all these peers can be shown it.

        To open memory costs a peer more than to copy it once: so what is sent once is copied.
        """
        storage = data.untyped_storage()
        key, place = storage._cdata, (storage.data_ptr(), storage.nbytes())
        known = self._storages.get(key)
        if known is not None and known.place != place:
            self._forget(key)
            known = None
        if known is None:
            self._sweep()
            self._storages[key] = _Storage(StorageWeakRef(storage), place)  # type: ignore[no-untyped-call]
            return None
        if known.hopeless:
            return None
        try:
            shown = known.shown or Shown(self._streams.alias(data), next(self._serials))
            for peer in peers:
                shown.token(peer, self._streams)
        except RuntimeError as error:  # memory of another allocator, or of another process
            logger.info("a tensor's memory cannot be shown to peers, and is copied: %s", error)
            self._storages[key] = known._replace(hopeless=True, shown=None)
            return None
        self._storages[key] = known._replace(shown=shown)
        return shown

    def close(self) -> None:
        """Give back what no peer has yet to read."""
        self._free.clear()
        self._storages.clear()
        self._waiting = 0

    def _sweep(self) -> None:
        """Forget storages that are gone, and have peers told."""
        for key in [key for key, known in self._storages.items() if known.weak.expired()]:  # type: ignore[no-untyped-call]
            self._forget(key)

    def _forget(self, key: int) -> None:
        known = self._storages.pop(key)
        if known.shown is not None:
            self._retire(known.shown)

    def _settle(self, buffer: Shown) -> None:
        for slot in buffer.readers:
            slot.free(self._streams)
        buffer.readers.clear()

    def _retire(self, shown: Shown) -> None:
        for peer in shown.tokens:
            self.retired[peer].append(shown.serial)
