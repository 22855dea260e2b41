"""An edge between two ranks that see the same memory: a few words, and tensors where they lie.

Both ends are single threads as far as the words go. A version is published by one store. A reader
marks the version that it reads and then looks whether it is still the newest; a writer that looks
for room sees the mark. So neither ever waits for the other::

    writer                              reader
      fill header of version v            mark v as held
      newest = v                          fence
      fence                               read the header of v
      a buffer is free if no edge has     newest is still v? then v is safe to read,
      it as its newest or held version    else look again

To *take* what was published excludes the writer's adding to it: each says first what it is about to
do, and then looks whether the other has said so too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator

import torch

from asyncddp.memory.shared import Arena, Place, View, fence, full_fence
from asyncddp.windows.contract import Buffer, Incoming, Outgoing, Shown
from asyncddp.windows.sums import weighted

__all__ = ["WORDS", "Inlet", "Outlet"]

_LINE = 8  # words of 8 bytes in a line of a processor's cache
WORDS = 4 * _LINE
"""Words of an edge: the writer's, two headers by the parity of the version, the reader's."""

_NEWEST, _ADDING, _CLOCK = 0, 1, 2
_HELD, _TAKEN, _TAKING = 3 * _LINE, 3 * _LINE + 1, 3 * _LINE + 2
_HEADER = struct.Struct("=QddQQQQQ")  # floor weight p clock time descriptor size offset


class Outlet(Outgoing):
    """The writer's end.

    Args:
        view: Memory that both see.
        offset: Where the words of the edge begin.
        wait: Begins to wait for the reader; what it gives is called again and again, and raises
            when that takes too long.
    """

    def __init__(self, view: View, offset: int, wait: Callable[[], Callable[[], None]]) -> None:
        self._words, self._raw = view.words(offset, WORDS), view.raw(offset, 8 * WORDS)
        self._version = 0
        self._readable: dict[int, tuple[Buffer, float, float, int]] = {}
        self._wait = wait

    def put(self, buffer: Buffer, weight: float, p: float, clock: int) -> int:
        """Publish by one store."""
        self._show(buffer, weight, p, clock, self._version + 1)
        return self._version

    def add(
        self, buffer: Buffer, weight: float, p: float, clock: int, room: Callable[[], Buffer]
    ) -> int:
        """Publish the buffer itself if all else was taken, otherwise the sum."""
        words = self._words
        self._begin_to_add()
        try:
            if words[_TAKEN] >= self._version:
                self._show(buffer, weight, p, clock, 0)
            else:
                known, factor, earlier, floor = self._readable[self._version]
                total = room()
                weighted(total.tensor, [(known.tensor, factor), (buffer.tensor, weight)])
                self._show(total, 1.0, earlier + p, clock, floor)
                total.drop()  # in use by being the newest
        finally:
            fence()
            words[_ADDING] = 0
        return self._version

    def _begin_to_add(self) -> None:
        """Keep the reader from taking; it takes for microseconds, but may be stopped meanwhile."""
        words, again = self._words, None
        words[_ADDING] = 1
        full_fence()
        while words[_TAKING]:
            words[_ADDING] = 0
            again = again or self._wait()
            again()
            words[_ADDING] = 1
            full_fence()

    def tick(self, clock: int) -> None:
        """Tell how many steps were made."""
        self._words[_CLOCK] = clock

    def wanted(self) -> bool:
        """Whether the reader has ever taken anything."""
        return self._words[_TAKEN] > 0

    def in_use(self) -> Iterator[Buffer]:
        """What is newest, and what the reader holds."""
        full_fence()
        wanted = (self._version, self._words[_HELD])
        self._readable = {v: entry for v, entry in self._readable.items() if v in wanted}
        return (entry[0] for entry in self._readable.values())

    def _show(self, buffer: Buffer, weight: float, p: float, clock: int, floor: int) -> None:
        place, version, words = buffer.place, self._version + 1, self._words
        if place is None:
            raise RuntimeError("a buffer without a place was shown to a rank of this machine")
        start = 8 * _LINE * (1 + version % 2)
        _HEADER.pack_into(self._raw, start, floor, weight, p, clock, time.monotonic_ns(), *place)
        self._readable[version] = buffer, weight, p, floor
        words[_CLOCK] = max(clock, words[_CLOCK])
        fence()
        words[_NEWEST] = self._version = version


class Inlet(Incoming):
    """The reader's end.

    Args:
        arena: Opens the writer's memory.
        process: The writer's process.
        place: Where in it the words of the edge begin.
        shape: Of the tensors.
        dtype: Of the tensors.
    """

    def __init__(
        self,
        arena: Arena,
        process: int,
        place: Place,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        view = arena.open(process, place)
        self._arena, self._process, self._form = arena, process, (shape, dtype)
        self._words = view.words(place.offset, WORDS)
        self._raw = view.raw(place.offset, 8 * WORDS)
        self._tensors: dict[Place, torch.Tensor] = {}

    @property
    def taken(self) -> int:  # type: ignore[override]
        """The version up to which everything was taken."""
        return self._words[_TAKEN]

    def look(self) -> Shown | None:
        """Mark, read, and see whether it is still so."""
        words = self._words
        while version := words[_NEWEST]:
            words[_HELD] = version
            full_fence()
            start = 8 * _LINE * (1 + version % 2)
            floor, weight, p, clock, when, *place = _HEADER.unpack_from(self._raw, start)
            fence()
            if words[_NEWEST] == version:
                tensor = self._tensor(Place(*place))
                return Shown(version, floor, weight, p, clock, when / 1e9, tensor)
        return None

    def take(self) -> tuple[bool, Shown | None]:
        """Say so, see whether the writer is adding, look, and count it as taken."""
        words = self._words
        words[_TAKING] = 1
        full_fence()
        if words[_ADDING]:
            words[_TAKING] = 0
            return False, None
        before, shown = words[_TAKEN], self.look()
        if shown is not None:
            words[_TAKEN] = shown.version
        fence()
        words[_TAKING] = 0
        return True, shown if shown is not None and shown.version > before else None

    def release(self) -> None:
        """Take the mark away."""
        fence()
        self._words[_HELD] = 0

    def version(self) -> int:
        """The version that was published last."""
        return self._words[_NEWEST]

    def clock(self) -> int:
        """How many steps the writer has made."""
        return self._words[_CLOCK]

    def _tensor(self, place: Place) -> torch.Tensor:
        found = self._tensors.get(place)
        if found is None:
            view = self._arena.open(self._process, place)
            found = self._tensors[place] = view.tensor(place.offset, *self._form)
        return found
