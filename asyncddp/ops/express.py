"""The short way of a blocking average: on the calling thread, without the engine.

What was exchanged before under the same name and form is exchanged again through lanes. Where a
neighbour does not come at once, or anything is not as it was, the engine takes over at the point
that was reached, with its deadlines and its ear for contradiction.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from asyncddp.context import Context
from asyncddp.engine import Desk, Handle, Program, Steps, Stream
from asyncddp.engine.channels import Channel
from asyncddp.engine.engine import Turn
from asyncddp.engine.messages import Key
from asyncddp.engine.swap import Swap, soon
from asyncddp.errors import PeerError
from asyncddp.memory.allocate import empty
from asyncddp.ops.door import form_of
from asyncddp.ops.mixing import Mixing, mix
from asyncddp.ops.posted import Posted, detached
from asyncddp.timeline.ranges import Range
from topology import Schedule

__all__ = ["Express", "shorten"]

R = TypeVar("R")


class Express:
    """The short way of one verb for tensors of one name and form.

    Args:
        context: The world.
        verb: The verb.
        name: The name under which neighbours match it.
        channel: What was exchanged before.
    """

    _shown = False

    def __init__(self, context: Context, verb: str, name: str, channel: Channel) -> None:
        self._engine, self._channel = context.engine, channel
        self._rank, self._verb, self._name = context.rank, verb, name
        self._channels = context.engine.mailbox.channels
        self._schedule: Schedule | None = None
        self._rows: dict[int, Mixing] = {}
        self._pause = os.sched_yield if _crowded(context) else None

    def row(self, schedule: Schedule, number: int | None) -> Mixing:
        """The weights of a round, or of the one whose turn it is."""
        if number is None:
            number = self._engine.rounds(self._verb, self._name)
        if schedule is not self._schedule:
            self._schedule, self._rows = schedule, {}
        if schedule.period is not None:
            number %= schedule.period
        row = self._rows.get(number)
        if row is None:
            near = schedule.neighbors(self._rank, number)
            targets = dict.fromkeys(near.dst_ranks, 1.0)
            row = Mixing(near.self_weight, near.src_weights, targets)
            if schedule.period is not None:
                self._rows[number] = row
        return row

    def open(self, row: Mixing) -> bool:
        """Whether all neighbours of a round are reached through lanes, and none is under way."""
        channel = self._channel
        if channel.flight and channel.posted:
            channel.posted[-1].settle()
        return not channel.flight and self._serves(row)

    def _serves(self, row: Mixing) -> bool:
        return row.alike is not None and self._channel.serves(row.sources, row.targets)

    def run(
        self, row: Mixing, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Average a tensor, or do nothing and give None.

        Args:
            row: The weights.
            tensor: Contiguous, on the host, and of the channel's form.
            out: Such a tensor for the result, or None.
        """
        if profiler._is_profiler_enabled and not self._shown:
            return self._show(self.run, row, tensor, out)
        channel = self._channel
        if not self.open(row):
            return None
        own, into = detached(tensor), None if out is None else detached(out)
        step = self._engine.enter(self._verb, self._name, channel.flight)
        if step is None:
            return None
        found: torch.Tensor | Handle[torch.Tensor] | None = None
        try:
            if not row.swaps:
                found = self._streamed(step, row, own, into)
            elif channel.cut.pieces == 1:
                shown = int(channel.lane is None or channel.lane.post(step, row.targets, own))
                found = self.take(step, row, own, into, shown)
            else:
                found = self._swapped_in_pieces(step, row, own, into)
        finally:
            if found is None:
                self._give_up(step, row)
        result = found.wait() if isinstance(found, Handle) else found
        return result if out is None else out

    def start(
        self, row: Mixing, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor] | None:
        """Show a tensor, to be averaged when the handle is asked; or do nothing and give None."""
        if profiler._is_profiler_enabled and not self._shown:
            return self._show(self.start, row, tensor, out)
        channel, lane = self._channel, self._channel.lane
        late = out is not None and out.is_inference()  # it must be written in this mode, not later
        free = not late and self._free(row)
        step = self._engine.enter(self._verb, self._name, channel.flight) if free else None
        if step is None:
            for earlier in list(channel.posted):
                earlier.hand_over()
            return None
        own = detached(tensor)
        shown = int(lane is None or lane.post(step, row.targets, own))
        return Posted(self, channel, step, row, own, out, shown)

    def _show(self, way: Callable[..., R], *args: Any) -> R:
        """Go a way that has a name in torch's profiler."""
        self._shown = True
        try:
            with Range(f"ENQUEUE_{self._verb.upper()}"):
                return way(*args)
        finally:
            self._shown = False

    def _free(self, row: Mixing) -> bool:
        """Whether a tensor can be shown, and taken from its neighbours, without the engine."""
        channel, lane = self._channel, self._channel.lane
        return (
            channel.cut.pieces == 1
            and row.alike == 1.0
            and self._serves(row)
            and len(channel.flight) == len(channel.posted)
            and (lane is None or lane.free(self._engine.uses(self._name)))
        )

    def take(
        self, step: int, row: Mixing, own: torch.Tensor, out: torch.Tensor | None, shown: int
    ) -> torch.Tensor | Handle[torch.Tensor]:
        """Average a tensor of one piece that was shown, or leave it to the engine."""
        channel = self._channel
        if shown and row.swaps:
            seen = channel.seen[row.sources[0]]
            other = seen.whole(step)
            if other is None and soon(lambda: seen.whole(step) is not None, self._pause):
                other = seen.whole(step)
            if other is not None:
                result = torch.lerp(own, other, row.between, out=out)  # type: ignore[arg-type]  # a number
                seen.take(step, 1)
                channel.record(step, row.sources, row.targets)
                channel.flight.popleft()
                return result
        return self._streamed(step, row, own, out, shown=shown)

    def hand_over(
        self, step: int, row: Mixing, own: torch.Tensor, out: torch.Tensor | None, shown: int
    ) -> Handle[torch.Tensor]:
        """Let the engine end what was begun, so that no neighbour waits for the caller."""
        stream = self._stream(step, row, shown)
        steps = mix(stream, own, row, own.dtype, out)
        return self._engine.submit(self._resumed(stream, steps), Turn(Key(self._name, step), 0))

    def _give_up(self, step: int, row: Mixing) -> None:
        """Something came in between, such as Ctrl-C: fail where the peers hear of it."""
        if step in self._channel.flight:
            stream, key = self._stream(step, row, 0), Key(self._name, step)
            error = PeerError(f"rank {self._rank}: {self._verb} {key} was interrupted")
            self._engine.submit(self._refused(stream, error), Turn(key, 0))

    @property
    def lent(self) -> dict[int, Any]:
        """What was posted in this world and not been asked for yet."""
        return self._engine.lent

    def _swapped_in_pieces(
        self, step: int, row: Mixing, own: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | Handle[torch.Tensor]:
        """Many pieces to those who take them, and from one neighbour."""
        channel = self._channel
        result = empty(own.shape, own.dtype) if out is None else out
        swap = Swap(channel.lane, channel.seen[row.sources[0]], step, row.targets, self._pause)
        if self._moved(swap, row, own, result):
            channel.record(step, row.sources, row.targets)
            channel.flight.popleft()
            return result
        return self._streamed(step, row, own, result, shown=swap.shown, start=swap.taken)

    def _moved(self, swap: Swap, row: Mixing, own: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether a tensor has gone all the way."""
        weight: float = row.between  # type: ignore[assignment]  # a number where the row swaps
        same, split = out.data_ptr() == own.data_ptr(), self._channel.cut.split
        mine = None if same else self._channels.place_of(own)
        if not swap.begin(mine):
            return False
        if mine is None:
            return swap.staged(split(own), split(out), weight)
        place = swap.others_place()
        if place is None:
            return False
        other = self._channels.look(row.sources[0], self._channel, place)
        return swap.whole(own.view(-1), other, out.view(-1), weight)

    def _streamed(
        self,
        step: int,
        row: Mixing,
        own: torch.Tensor,
        out: torch.Tensor | None,
        *,
        shown: int = 0,
        start: int = 0,
    ) -> torch.Tensor | Handle[torch.Tensor]:
        """Piece by piece, for as long as it moves; the engine goes on when it does not."""
        stream, turn = self._stream(step, row, shown), Turn(Key(self._name, step), 0)
        steps = mix(stream, own, row, own.dtype, out, start)
        try:
            while soon(next(steps).done, self._pause):
                pass
        except StopIteration as stop:
            stream.close(failed=False)
            result: torch.Tensor = stop.value
            return result
        except PeerError as error:
            return self._engine.submit(self._refused(stream, error), turn)
        return self._engine.submit(self._resumed(stream, steps), turn)

    def _stream(self, step: int, row: Mixing, shown: int) -> Stream:
        key, cut = Key(self._name, step), self._channel.cut
        return Stream(
            self._channels,
            self._channel,
            key,
            cut,
            row.sources,
            row.targets,
            begun=True,
            shown=shown,
        )

    def _resumed(self, stream: Stream, rest: Steps[torch.Tensor]) -> Program[torch.Tensor]:
        def steps(desk: Desk) -> Steps[torch.Tensor]:
            """Take the stream over, and go on where it stands."""
            desk.adopt(stream, self._channel.form)
            return (yield from rest)

        return Program(self._verb, steps, self._name)

    def _refused(self, stream: Stream, error: PeerError) -> Program[torch.Tensor]:
        """Fail where the peers hear of it."""

        def steps(desk: Desk) -> Steps[torch.Tensor]:
            """Take the stream over, and fail."""
            desk.adopt(stream, self._channel.form)
            yield from ()
            raise error

        return Program(self._verb, steps, self._name)


def _crowded(context: Context) -> bool:
    """Whether the ranks of this machine are more than its cores."""
    return (os.cpu_count() or 1) < context.local_size


def way_of(context: Context, verb: str, name: str, channel: Channel) -> Express:
    """The short way, with notes of it where there is a timeline."""
    if context.recorder is None:
        return Express(context, verb, name, channel)
    from asyncddp.ops.express_recorded import RecordedExpress

    return RecordedExpress(context.recorder, context, verb, name, channel)


def shorten(
    context: Context, verb: str, given: str | None, name: str, tensor: torch.Tensor
) -> None:
    """Open the short way for tensors like this one, if they go through lanes by now.

    Args:
        context: The world.
        verb: The verb.
        given: The name that the user has given, or None.
        name: The name under which neighbours match it.
        tensor: What was averaged.
    """
    shortcuts = context.engine.shortcuts
    key = given, tensor.dtype, tensor.shape
    if key not in shortcuts and context.transport.neighborhood is not None:
        channel = context.engine.mailbox.channels.known(name, form_of(verb, tensor))
        if channel is not None and tensor.is_cpu:
            shortcuts[key] = way_of(context, verb, name, channel)
