"""One exchange with neighbours, piece by piece: what goes through our lane, what comes from theirs.

A stream has no posting while it is driven by the thread that calls the verb and everything comes at
once; it gets one when it has to wait, so that whoever contradicts it is heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncddp.engine.channels import Channel, Channels
from asyncddp.engine.lanes import Cut, Lane, SeenLane
from asyncddp.engine.messages import Key
from asyncddp.engine.posting import Arrival, Departure, Posting
from asyncddp.errors import MismatchError
from asyncddp.memory.shared import Place
from asyncddp.timeline.recorder import Recorder

__all__ = ["Drained", "Source", "Stream"]

WHOLE = Cut.whole((), torch.uint8)
"""One piece, whatever its size."""


class Source:
    """What comes from one neighbour; done once the piece at hand is here.

    Args:
        stream: What it is a part of.
        peer: The neighbour.
    """

    def __init__(self, stream: Stream, peer: int) -> None:
        self._stream, self.peer = stream, peer
        self._number = 0
        self._looked = False
        self._flat: torch.Tensor | None = None

    def at(self, number: int) -> Source:
        """Wait for this: piece ``number`` is here."""
        self._number = number
        return self

    def done(self) -> bool:
        """Whether it is."""
        stream = self._stream
        stream.raise_if_failed()
        if not stream.first:
            return False
        channel, step = stream.channel, stream.key.step
        seen = None if channel is None else channel.seen.get(self.peer)
        if seen is not None and seen.shown(step) > self._number and seen.addressed(step):
            return True
        arrival = self.arrival
        return arrival is not None and arrival.done()

    @property
    def arrival(self) -> Arrival | None:
        """The tensor, where it comes by message."""
        posting = self._stream.posting
        return None if posting is None else posting.arrivals[self.peer]

    def take(self) -> torch.Tensor:
        """The piece at hand, flat, once done."""
        stream, number = self._stream, self._number
        arrival = self.arrival
        if arrival is not None and arrival.tensor is not None:
            self._flat = arrival.tensor.reshape(-1)
        elif not self._looked:
            self._looked = True
            place = stream.shown_by(self.peer).place(stream.key.step)
            if place is not None:
                self._flat = stream.look(self.peer, place)
        if self._flat is not None:
            return stream.cut.piece(self._flat, number)
        return stream.shown_by(self.peer).slot(stream.key.step, number)

    def release(self) -> None:
        """The piece at hand has been read."""
        channel, step = self._stream.channel, self._stream.key.step
        if channel is not None and self.peer in channel.seen:
            seen = channel.seen[self.peer]
            if seen.shown(step):
                seen.take(step, self._number + 1)

    def missing(self) -> list[tuple[int, Key]]:
        """The peer."""
        return [(self.peer, self._stream.key)]


class Stream:
    """One use of a name between neighbours. Wait for it: there is room for the piece at hand.

    Args:
        channels: Of this rank.
        channel: Of the name and form, if there is one.
        key: Name and step.
        cut: How the tensors are cut; None where they stay whole.
        sources: Ranks from which a tensor comes.
        targets: Ranks that read ours from the lane.
        begun: Whether the channel knows that the step is under way.
        shown: Pieces of ours that have been shown.

    Attributes:
        posting: What messages about this exchange are held against, once there is one.
    """

    def __init__(
        self,
        channels: Channels,
        channel: Channel | None,
        key: Key,
        cut: Cut | None,
        sources: Iterable[int],
        targets: Sequence[int],
        *,
        begun: bool = False,
        shown: int = 0,
    ) -> None:
        self._channels, self.channel, self.key = channels, channel, key
        self.cut = cut or WHOLE
        self.sources = [Source(self, peer) for peer in sources]
        self.targets = tuple(targets)
        self.posting: Posting | None = None
        self._lane = None if channel is None or not self.targets else channel.lane
        self._number = 0
        self._resident, self._shown = False, shown
        if channel is not None and not begun:
            channel.flight.append(key.step)

    @property
    def recorder(self) -> Recorder | None:
        """Takes notes for the timeline, if there is one."""
        return self._channels.recorder

    @property
    def verb(self) -> str:
        """The verb, as far as it is known."""
        known = self.posting or self.channel
        return "" if known is None else known.form.verb

    @property
    def first(self) -> bool:
        """Whether all earlier uses of the channel have ended here."""
        return self.channel is None or self.channel.flight[0] == self.key.step

    def raise_if_failed(self) -> None:
        """Raise what made this exchange fail, if something did."""
        if self.posting is not None:
            self.posting.raise_if_failed()
        if self.channel is not None and self.channel.error is not None:
            error = self.channel.error
            self._channels.told(error)
            raise error
        if (
            self._lane is not None
            and self.channel is not None
            and self.channel.lane is not self._lane
        ):
            raise MismatchError(
                f"an exchange under the name {self.key.name!r} failed before {self.key}"
            )

    # what goes

    def at(self, number: int) -> Stream:
        """Wait for this: there is room for piece ``number``."""
        self._number = number
        return self

    def done(self) -> bool:
        """Whether there is."""
        self.raise_if_failed()
        if self._lane is None:
            return True
        if not self.first:
            return False
        if self._number < self._shown:
            return True
        if self._number == 0:
            return self._lane.free(self.key.step)
        return self._resident or not self._late()

    def missing(self) -> list[tuple[int, Key]]:
        """Who has yet to take something."""
        return [(rank, Key(self.key.name, step)) for rank, step in self._late()]

    def _late(self) -> list[tuple[int, int]]:
        """Who is so far behind that there is no room."""
        needed = self._number - self.cut.slots + 1
        if self._lane is None or (self._number > 0 and needed <= 0):
            return []
        return self._lane.late(self.key.step, needed)

    def put(self, number: int, flat: torch.Tensor, factor: float, place: Place | None) -> None:
        """Show piece ``number`` of a flat tensor, or all of it where it lies.

        Args:
            number: Pieces are put in order, each once there is room.
            flat: The tensor.
            factor: With which it is multiplied; 1 where it is shown where it lies.
            place: Where it lies, if it is to be read there.
        """
        lane, step = self._lane, self.key.step
        if lane is None or number < self._shown:
            return
        if number == 0:
            self._resident = place is not None
            lane.begin(step, self.targets, place)
            if self._resident:
                lane.show(step, self.cut.pieces)
        if self._resident:
            return
        slot, piece = lane.slot(step, number), self.cut.piece(flat, number)
        if factor == 1.0:
            slot.copy_(piece)
        else:
            torch.mul(piece, factor, out=slot)
        lane.show(step, number + 1)

    def sent(self) -> Departure | Drained:
        """Wait for this: what goes by message has left, and was confirmed where that was asked."""
        return Drained(self, None, 0) if self.posting is None else self.posting.sent()

    def taken(self, number: int) -> Drained:
        """Wait for this: all targets have taken so many pieces."""
        return Drained(self, self._lane, number)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies, if neighbours can read it there."""
        return self._channels.place_of(tensor)

    # what comes

    def shown_by(self, peer: int) -> SeenLane:
        """A neighbour's lane."""
        if self.channel is None:
            raise RuntimeError("there is no lane")
        return self.channel.seen[peer]

    def received(self) -> torch.Tensor | None:
        """The first neighbour's tensor, where it came by message and is nobody else's."""
        arrival = self.sources[0].arrival if self.sources else None
        return None if arrival is None else arrival.tensor

    def look(self, peer: int, place: Place) -> torch.Tensor:
        """A neighbour's tensor where it lies."""
        if self.channel is None:
            raise RuntimeError("there is no lane")
        return self._channels.look(peer, self.channel, place)

    def close(self, *, failed: bool) -> None:
        """It has ended; harmless when called twice."""
        peers = [source.peer for source in self.sources]
        self.sources.clear()  # they know each other: without this, memory waits for the gc
        channel, step = self.channel, self.key.step
        if channel is None or step not in channel.flight:
            return
        channel.flight.remove(step)
        if not failed:
            targets = self.targets if self.posting is None else self.posting.targets
            channel.record(step, peers, targets)
            return
        for peer in peers:
            seen = channel.seen.get(peer)
            if seen is not None:  # so that it need not wait for us
                seen.take(step, self.cut.pieces)
        if channel.lane is self._lane:
            self._channels.retire(channel)


class Drained:
    """Wait for this: what lies in our memory has been read.

    Args:
        stream: The exchange.
        lane: Our lane in it, if there is one.
        number: Pieces that are to be read.
    """

    def __init__(self, stream: Stream, lane: Lane | None, number: int) -> None:
        self._stream, self._lane, self._number = stream, lane, number

    def done(self) -> bool:
        """Whether it has."""
        self._stream.raise_if_failed()
        return not self.missing()

    def missing(self) -> list[tuple[int, Key]]:
        """Who has yet to read it."""
        if self._lane is None:
            return []
        key = self._stream.key
        late = self._lane.late(key.step, self._number)
        return [(rank, Key(key.name, step)) for rank, step in late]
