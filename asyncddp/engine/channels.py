"""Channels: what a rank keeps of a name and form that neighbours have exchanged before.

The first exchange of a name goes by message: header, bytes, confirmation. With the second one a
rank offers its neighbours on this machine a lane; from the third one on, what they exchange under
that name and form is read where it lies, and a number takes the place of the header.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch

from asyncddp.engine.lanes import MOST_RANKS, Cut, Lane, SeenLane
from asyncddp.engine.messages import Data, Key
from asyncddp.engine.posting import Form
from asyncddp.engine.recorded import RecordedLane, RecordedSeenLane
from asyncddp.errors import PeerError
from asyncddp.memory.shared import Arena, Place, View
from asyncddp.timeline.recorder import Recorder
from asyncddp.transport.contract import Neighborhood

__all__ = ["Channel", "Channels"]

_MOST_LANES = 2048
_MOST_BYTES = 1 << 28  # of all lanes of this rank
_MOST_CHANNELS = 4096
_HISTORY = 256


class Channel:
    """One name and form, as this rank uses it with the others of its machine.

    Args:
        name: The name.
        form: The form.
        cut: How its tensors are cut.

    Attributes:
        lane: Where this rank shows its tensors; None until it was offered.
        readers: Ranks that have been told of the lane.
        seen: The neighbours' lanes.
        flight: Steps under way here, the first of which may go on.
        posted: Handles of those that nobody drives.
        error: Why a neighbour has refused what had counted as done.
    """

    def __init__(self, name: str, form: Form, cut: Cut) -> None:
        self.name, self.form, self.cut = name, form, cut
        self.lane: Lane | None = None
        self.readers: set[int] = set()
        self.seen: dict[int, SeenLane] = {}
        self.flight: deque[int] = deque()
        self.posted: deque[Any] = deque()
        self.error: PeerError | None = None
        self._history: deque[tuple[int, Iterable[int], Iterable[int]]] = deque(maxlen=_HISTORY)

    def serves(self, sources: Iterable[int], targets: Collection[int]) -> bool:
        """Whether all of these ranks are reached through lanes."""
        for peer in sources:
            if peer not in self.seen:
                return False
        return not targets or (self.lane is not None and self.readers.issuperset(targets))

    def record(self, step: int, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Remember with whom a step was exchanged."""
        self._history.append((step, sources, targets))

    def partners(self, step: int) -> tuple[frozenset[int], frozenset[int]] | None:
        """From whom a step came and to whom it went, if it is remembered."""
        for known, sources, targets in list(self._history):
            if known == step:
                return frozenset(sources), frozenset(targets)
        return None


class Channels:
    """All channels of one rank.

    Args:
        neighborhood: The ranks with whom it shares memory, or None.
        rank: This rank.
        recorder: Takes notes for the timeline, if there is one.
    """

    def __init__(
        self, neighborhood: Neighborhood | None, rank: int, recorder: Recorder | None = None
    ) -> None:
        if neighborhood is not None and len(neighborhood.processes) > MOST_RANKS:
            neighborhood = None
        self._near, self._rank, self.recorder = neighborhood, rank, recorder
        self._ranks = tuple(sorted(neighborhood.processes)) if neighborhood else ()
        self._lock = threading.Lock()
        self._by_name: dict[str, dict[Form, Channel]] = {}
        self._channels = self._lanes = self._bytes = 0
        self.late: PeerError | None = None
        """An error about an exchange that had already ended here; raised by the next verb."""

    def find(self, key: Key, form: Form, targets: Iterable[int]) -> Channel | None:
        """The channel for a use of a name, if it has one; opened in the second use.

        Args:
            key: Name and step.
            form: What the neighbours agree about.
            targets: Ranks to which a tensor goes.
        """
        channel = self._by_name.get(key.name, {}).get(form)
        if channel is None:
            if self._near is None or key.step < 1 or key.collective or None in form.shape:
                return None
            if form.device != "cpu":
                return None
            if self._channels >= _MOST_CHANNELS:
                return None
            shape = tuple(size or 0 for size in form.shape)
            cut = Cut.of(shape, getattr(torch, form.dtype))
            channel = Channel(key.name, form, cut)
            with self._lock:
                self._by_name.setdefault(key.name, {})[form] = channel
                self._channels += 1
        if channel.lane is None and any(target in self._ranks for target in targets):
            channel.lane = self._lane(channel)
        return channel

    def known(self, name: str, form: Form) -> Channel | None:
        """The channel of a name and form, if there is one."""
        return self._by_name.get(name, {}).get(form)

    def _lane(self, channel: Channel) -> Lane | None:
        cut = channel.cut
        size = Lane.nbytes(len(self._ranks), cut)
        if self._near is None or not cut.count or self._lanes >= _MOST_LANES:
            return None
        if self._bytes + size > _MOST_BYTES:
            return None
        try:
            lane = self._made(channel, self._near.arena)
        except OSError:
            return None
        self._lanes, self._bytes = self._lanes + 1, self._bytes + size
        return lane

    def _made(self, channel: Channel, arena: Arena) -> Lane:
        if self.recorder is None:
            return Lane(arena, self._ranks, channel.cut)
        facts = self.recorder, channel.form.verb, channel.name
        return RecordedLane(*facts, arena, self._ranks, channel.cut)

    def offer(self, channel: Channel | None, peer: int) -> Place | None:
        """Where a peer finds the channel's lane, if it can and does not know yet."""
        if channel is None or channel.lane is None or peer not in self._ranks:
            return None
        return None if peer in channel.readers else channel.lane.place

    def watch(self, channel: Channel, peer: int, place: Place) -> None:
        """A peer has offered its lane."""
        if self._near is not None:
            view = self._near.arena.open(self._near.processes[peer], place)
            channel.seen[peer] = self._found(channel, peer, view, place.offset)

    def _found(self, channel: Channel, peer: int, view: View, offset: int) -> SeenLane:
        ranks, rank, cut = self._ranks, self._rank, channel.cut
        if self.recorder is None:
            return SeenLane(view, offset, ranks, rank, cut)
        verb, name = channel.form.verb, channel.name
        return RecordedSeenLane(self.recorder, peer, verb, name, view, offset, ranks, rank, cut)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies, if its memory is shared."""
        return None if self._near is None else self._near.arena.locate(tensor)

    def look(self, peer: int, channel: Channel, place: Place) -> torch.Tensor:
        """A peer's tensor, flat, where it lies."""
        if self._near is None:
            raise RuntimeError("there is no shared memory")
        view = self._near.arena.open(self._near.processes[peer], place)
        return view.tensor(place.offset, (channel.cut.count,), channel.cut.dtype)

    def retire(self, channel: Channel) -> None:
        """An exchange has failed: its lane is left alone, and another one offered next time."""
        channel.lane = None
        channel.readers.clear()

    def under(self, name: str) -> list[Channel]:
        """The channels of a name."""
        return list(self._by_name.get(name, {}).values())

    def partners(self, key: Key) -> tuple[frozenset[int], frozenset[int]] | None:
        """With whom a use of a name was exchanged, if a channel remembers it."""
        return next(filter(None, (one.partners(key.step) for one in self.under(key.name))), None)

    def flying(self, key: Key) -> bool:
        """Whether a use of a name is under way in some channel."""
        return any(key.step in list(channel.flight) for channel in self.under(key.name))

    def told(self, error: PeerError) -> None:
        """A mistake that was found late has been raised: nobody else is to raise it again."""
        if self.late is error:
            self.late = None
        with self._lock:
            every = [one for named in self._by_name.values() for one in named.values()]
        for channel in every:
            if channel.error is error:
                channel.error = None

    def strays(self) -> list[tuple[int, Data]]:
        """What peers show to this rank and nobody here has taken yet, as messages would say it."""
        with self._lock:
            every = [one for named in self._by_name.values() for one in named.values()]
        return [found for channel in every for found in strays_of(channel)]


def strays_of(channel: Channel) -> list[tuple[int, Data]]:
    """What peers show in one channel and nobody here has taken yet."""
    form = channel.form
    shape = tuple(size or 0 for size in form.shape)
    found = []
    for peer, seen in list(channel.seen.items()):
        for step in seen.untaken():
            data = Data(Key(channel.name, step), form.verb, form.dtype, shape, b"", -1)
            found.append((peer, data))
    return found
