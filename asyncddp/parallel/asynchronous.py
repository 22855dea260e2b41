"""Blocks that neighbours publish and read through windows, without waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import NotInitializedError, PeerError, PeerLeftError
from asyncddp.ops.barrier import barrier
from asyncddp.ops.mixing import Mixing
from asyncddp.ops.windows import (
    create_along,
    win_free,
    win_put_nonblocking,
    win_staleness,
    win_update,
)
from asyncddp.parallel.blocks import Block
from asyncddp.parallel.exchange import Exchange
from asyncddp.windows import Staleness, Window, windows_of
from asyncddp.windows.departures import Departures
from asyncddp.windows.handle import WindowHandle
from topology import GraphOrSchedule, Schedule, TopologyError, describe

__all__ = ["Asynchronous"]


class Asynchronous(Exchange):
    """One window per block: put after the step, update before it, wait for nobody.

    The own term of the average is the live parameter, a neighbour's is what it has put last.
    """

    _along: Schedule

    def __init__(self, context: Context, label: str, topology: GraphOrSchedule | None) -> None:
        self._departures = Departures(context.engine.has_left)
        super().__init__(context, label, topology)

    def checked(self, topology: GraphOrSchedule) -> Schedule:
        """Windows lie along the edges of all rounds, so that these must be known."""
        schedule = super().checked(topology)
        if schedule.period is None:
            raise TopologyError(
                f"argument topology: {describe(topology)} never repeats, so that its edges are not "
                "known; with sync=False use a graph, or a schedule with a period"
            )
        return schedule

    def choose(self, topology: GraphOrSchedule | None) -> None:
        """Make the windows anew along other edges; collective once there are any."""
        super().choose(topology)
        if self.blocks:
            self._free()
            self._create()

    def open(self, blocks: Sequence[Block]) -> None:
        """Make the windows, and show what is in them."""
        super().open(blocks)
        self._create()

    def _create(self) -> None:
        self._along = self.schedule
        with use(self.context):
            for block in self.blocks:
                block.fill()
                create_along(self._along, block.flat, self.name(block))
        self.renew(mixed=False)

    def _free(self) -> None:
        with use(self.context):
            for block in self.blocks:
                win_free(self.name(block))

    @property
    def departed(self) -> tuple[int, ...]:
        """Neighbours that had left in the last step, ascending."""
        return self._departures.now

    def begin(self, step: int) -> None:
        """What neighbours need was put after the last step; look who takes part in this one."""
        for window in self._windows()[:1]:  # all blocks make the same steps
            sources = window.edges.incoming
            steps = {source: window.steps_of(source, got=False) for source in sources}
            self._departures.look(window.steps, steps)

    def _windows(self) -> list[Window]:
        find = windows_of(self.context).find
        return [find("DecentralizedDataParallel", self.name(block)) for block in self.blocks]

    def mix(self, block: Block, step: int) -> None:
        """Mix with whatever is there."""
        near = self._along.neighbors(self.context.rank, step)
        row = Mixing(near.self_weight, near.src_weights, {})
        with use(self.context), torch.no_grad():
            block.fill()
            self._update(block, row.without(self.departed))
            block.spill()

    def _update(self, block: Block, row: Mixing) -> None:
        """Mix with neighbours whose memory can still be read."""
        name = self.name(block)
        try:
            win_update(name, row.self_weight, row.src_weights)
        except PeerLeftError:
            window = windows_of(self.context).find("DecentralizedDataParallel", name)
            row = row.without(window.unreadable(row.src_weights))
            win_update(name, row.self_weight, row.src_weights)

    def publish(self, block: Block, step: int) -> None:
        """Put it to those who mix it in that round."""
        with use(self.context):
            self._put(block, self._along.neighbors(self.context.rank, step).dst_ranks)

    def _put(self, block: Block, ranks: Sequence[int]) -> WindowHandle:
        block.fill()
        self.bytes_sent += len(ranks) * block.flat.nbytes
        return win_put_nonblocking(block.flat, self.name(block), dst_weights=ranks)

    def settle(self) -> None:
        """Neighbours read copies."""

    def finish(self, step: int) -> None:
        """Nothing is under way that a step would have to wait for."""

    def renew(self, *, mixed: bool) -> None:
        """Show the new values to all neighbours before anybody goes on."""
        if not self.blocks:
            return
        rounds = range(self._along.period or 1)
        every = [self._along.neighbors(self.context.rank, k).dst_ranks for k in rounds]
        ranks = sorted({rank for targets in every for rank in targets})
        with use(self.context):
            for handle in [self._put(block, ranks) for block in self.blocks]:
                handle.wait()
            barrier()

    def conclude(self) -> None:
        """Tell neighbours, so that they give this rank's weight to themselves."""
        for window in self._windows():
            window.conclude().wait()

    def resume(self) -> None:
        """Tell neighbours."""
        for window in self._windows():
            window.resume()

    def close(self) -> None:
        """Free the windows; collective."""
        with suppress(PeerError, NotInitializedError):
            self._free()
        self.blocks = ()

    def staleness(self) -> dict[int, Staleness]:
        """How old what was last read of each neighbour is, of the oldest block."""
        worst: dict[int, Staleness] = {}
        with use(self.context):
            for block in self.blocks:
                for rank, found in win_staleness(self.name(block)).items():
                    known = worst.get(rank, found)
                    worst[rank] = max(known, found, key=lambda one: (one.steps, one.seconds))
        return worst
