"""Wait-free writer and reader of a window's tensors, in shared memory of one machine.

Each end is used by a single thread at a time. A version is published by one store. A reader marks
the version that it reads, and then checks that it is still the newest; a writer that looks for a
free buffer sees the mark. So neither ever waits for the other, not even if the other is stopped
in the middle::

    writer                              reader
      fill header of version v            mark v as held
      newest = v                          store_fence
      fence                               read the header of v
      a buffer is free if no edge has     newest is still v? then v is safe to read,
      it as its newest or held version    else look again

A reader that *takes* a version, so that nothing more is added to it, first marks it as intended; it
has taken the version if that is still the newest afterwards. A writer that accumulates cannot know
if the reader is just succeeding. Therefore it publishes several sums, each of all tensors after one
version: after the version that the reader has taken, after the version that it intends to take, and
after the newest but one, which it may have begun to take since. The reader knows which sum fits.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from asyncddp.errors import PeerLeftError
from asyncddp.kernels.cpu_weighted_sum import weighted_sum
from asyncddp.shm.arena import (
    Arena,
    MappedChunk,
    SharedMemoryHandle,
    full_memory_fence,
    store_fence,
)
from asyncddp.tensors.allocation import empty
from asyncddp.windows.edge import (
    AcquireBuffer,
    EdgeReader,
    EdgeWriter,
    PublishedSnapshot,
    RefCountedBuffer,
)

_LINE = 8  # words of 8 bytes in a line of a processor's cache
WORDS = 8 * _LINE
"""Words of an edge: the writer's line, headers of even and odd versions, the reader's line."""

_NEWEST, _CLOCK = 0, 1
_HEADER = 3 * _LINE  # words of a header
_HELD, _TAKEN, _INTENDED, _WANTED = (7 * _LINE + k for k in range(4))
_HEAD = struct.Struct("=4Q")  # floor, clock, time, number of sums
_SUM = struct.Struct("=QddQQQ")  # after which version, weight, p, descriptor, size, offset
_MAX_SUMS = 3  # sums of a version
_HEADS = {count: struct.Struct("=4Q" + count * "QddQQQ") for count in range(1, _MAX_SUMS + 1)}
_ONE = _HEADS[1]


class _PublishedSum(NamedTuple):
    """Sum of tensors that a rank has accumulated for a neighbour, with its push-sum weight."""

    buffer: RefCountedBuffer
    weight: float
    p: float


class SharedMemoryWriter(EdgeWriter):
    """Writer that publishes a window's tensors to a neighbour through shared memory.

    The words of the edge, initially zero, begin at the offset.
    """

    def __init__(self, view: MappedChunk, offset: int) -> None:
        self._words, self._raw = view.words(offset, WORDS), view.raw(offset, 8 * WORDS)
        self._floor = 0
        self._sums: dict[int, _PublishedSum] = {}  # of the newest version, by what they come after
        self._older: dict[int, list[RefCountedBuffer]] = {}  # of versions that may be held still

    @override
    def put(self, buffer: RefCountedBuffer, weight: float, p: float, clock: int) -> int:
        self._floor = self.published + 1
        return self._publish({self.published: _PublishedSum(buffer, weight, p)}, clock)

    @override
    def add(
        self, buffer: RefCountedBuffer, weight: float, p: float, clock: int, acquire: AcquireBuffer
    ) -> int:
        full_memory_fence()  # between the newest version and what the reader says
        intended = self._words[_INTENDED]
        store_fence()  # in this order: what was intended may have been taken meanwhile
        taken = self._words[_TAKEN]
        sums = {self.published: _PublishedSum(buffer, weight, p)}
        totals = []
        try:
            for since in {max(version, self._floor - 1) for version in (taken, intended)}:
                known = self._sums.get(since)
                if known is None:  # nothing came since, or it is too late for that intention
                    continue
                total = acquire()
                totals.append(total)
                terms = [(known.buffer.tensor, known.weight), (buffer.tensor, weight)]
                weighted_sum(total.tensor, terms)
                sums[since] = _PublishedSum(total, 1.0, known.p + p)
            return self._publish(sums, clock)
        finally:
            for total in totals:
                total.drop()  # in use by being the newest

    @override
    def set_clock(self, clock: int) -> None:
        self._words[_CLOCK] = clock

    def reader_gets(self) -> bool:
        """Return whether the reader has ever got a tensor."""
        return self._words[_WANTED] > 0

    @override
    def has_unread(self) -> bool:
        return self._words[_TAKEN] < self.published

    @override
    def in_use(self) -> Sequence[RefCountedBuffer]:
        buffers = [one.buffer for one in self._sums.values()]
        if self._older:
            held = self._words[_HELD]
            found = self._older.get(held)
            self._older = {} if found is None else {held: found}
            if found is not None:
                buffers += found
        return buffers

    def _publish(self, sums: dict[int, _PublishedSum], clock: int) -> int:
        values: list[float] = []
        for since, (buffer, weight, p) in sums.items():
            if buffer.place is None:
                raise RuntimeError("a buffer without a place was shown to a rank of this machine")
            values += (since, weight, p, *buffer.place)
        words, version = self._words, self.published + 1
        if self._sums:
            self._older[self.published] = [one.buffer for one in self._sums.values()]
        start, now = 8 * (_LINE + _HEADER * (version % 2)), time.monotonic_ns()
        store_fence()  # the header of the version before the last is not the newest any more
        _HEADS[len(sums)].pack_into(self._raw, start, self._floor, clock, now, len(sums), *values)
        store_fence()
        words[_NEWEST] = version
        store_fence()  # who has waited for this clock finds this version
        words[_CLOCK] = clock
        self._sums, self.published = sums, version
        return version


class SharedMemoryReader(EdgeReader):
    """Reader of the tensors that a neighbour publishes in a window through shared memory.

    The words of the edge begin at a place in the memory of the writer's process.
    """

    def __init__(
        self,
        arena: Arena,
        process: int,
        place: SharedMemoryHandle,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        what: str,
    ) -> None:
        view = arena.open(process, place)
        self._arena, self._process, self._what = arena, process, what
        self._shape, self._dtype = shape, dtype
        self._words = view.words(place.offset, WORDS)
        self._raw = view.raw(place.offset, 8 * WORDS)
        self._tensors: dict[SharedMemoryHandle, torch.Tensor] = {}
        self.taken = 0

    @override
    def look(self) -> PublishedSnapshot | None:
        return self._read(take=False)

    @override
    def take(self) -> PublishedSnapshot | None:
        snapshot = self._read(take=True)
        if snapshot is not None:
            self.taken = self._words[_TAKEN] = snapshot.version
        return snapshot

    def _read(self, *, take: bool) -> PublishedSnapshot | None:
        """Mark the newest version as held, read it, and retry unless it is still the newest."""
        words = self._words
        while (version := words[_NEWEST]) > self.taken:
            words[_HELD] = version
            if take:
                words[_INTENDED] = version
            full_memory_fence()
            start = 8 * (_LINE + _HEADER * (version % 2))
            floor, clock, when, count, *first = _ONE.unpack_from(self._raw, start)
            sums: list[Sequence[Any]] = [first]
            for number in range(1, min(count, _MAX_SUMS)):  # arbitrary ones while being overwritten
                sums.append(_SUM.unpack_from(self._raw, start + _HEAD.size + number * _SUM.size))
            store_fence()
            if words[_NEWEST] == version:
                after = max(self.taken, floor - 1)
                for since, weight, p, *place in sums:
                    if since == after:
                        known = SharedMemoryHandle(*place)
                        tensor = self._tensors.get(known)
                        if tensor is None:
                            tensor = self._open_tensor(known)
                        return PublishedSnapshot(
                            version, floor, weight, p, clock, when / 1e9, tensor
                        )
                raise RuntimeError(f"{self._what}: version {version} does not follow upon {after}")
        return None

    @override
    def release(self) -> None:
        store_fence()
        self._words[_HELD] = 0

    def announce_gets(self) -> None:
        """Tell the writer that this rank uses gets, so that it publishes its updates."""
        self._words[_WANTED] = 1

    @override
    def version(self) -> int:
        return self._words[_NEWEST]

    @override
    def clock(self) -> int:
        return self._words[_CLOCK]

    def _open_tensor(self, place: SharedMemoryHandle) -> torch.Tensor:
        if 0 in self._shape:
            return empty(self._shape, self._dtype)
        try:
            view = self._arena.open(self._process, place)
        except FileNotFoundError as error:
            raise PeerLeftError(
                f"{self._what}: it has ended, and what it published last was never read here"
            ) from error
        tensor = self._tensors[place] = view.tensor(place.offset, self._shape, self._dtype)
        return tensor
