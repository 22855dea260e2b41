"""Blocks that are averaged in step with the neighbours, while forward and backward go on."""

from __future__ import annotations

from contextlib import suppress
from weakref import ref

import torch

from asyncddp.algorithms.adapt_with_combine import AdaptWithCombine
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import NotInitializedError, PeerError
from asyncddp.memory.buckets import Make
from asyncddp.ops.neighbor_allreduce import neighbor_allreduce_nonblocking
from asyncddp.parallel.blocks import Block
from asyncddp.parallel.exchange import Exchange
from topology import GraphOrSchedule

__all__ = ["Synchronous"]


class Synchronous(Exchange):
    """One message per block, step and neighbour; a step waits for the neighbours' last step.

    A block is under way from its publication to its mixing; in between its parameters are read, by
    the model and by neighbours, and nobody may change them. A block that is not under way when a
    backward pass begins, in the first step or after new values, is sent then.
    """

    needs = AdaptWithCombine.needs

    def __init__(self, context: Context, label: str, topology: GraphOrSchedule | None) -> None:
        super().__init__(context, label, topology)
        self._under_way = _UnderWay(self)
        self._mixed: set[int] = set()

    @property
    def make(self) -> Make | None:
        """Neighbours on this machine read blocks where they lie."""
        near = self.context.transport.neighborhood
        return None if near is None else near.arena.empty

    def begin(self, step: int) -> None:
        """Send what is not under way."""
        for block in self.blocks:
            if block.number not in self._under_way and block.number not in self._mixed:
                self._send(block, step)

    def mix(self, block: Block, step: int) -> None:
        """Wait for the average, and take it."""
        if block.number in self._mixed:
            return
        if block.number not in self._under_way:
            self._send(block, step)
        mixed = self._under_way[block.number].wait()
        block.insist_unchanged()
        block.take(mixed)
        del self._under_way[block.number]
        self._mixed.add(block.number)

    def publish(self, block: Block, step: int) -> None:
        """Send it."""
        self._send(block, step)
        self._mixed.discard(block.number)

    def _send(self, block: Block, step: int) -> None:
        near = self.schedule.neighbors(self.context.rank, step)
        block.fill()
        block.remember()
        with use(self.context), torch.no_grad():
            self._under_way[block.number] = neighbor_allreduce_nonblocking(
                block.flat,
                self_weight=near.self_weight,
                src_weights=near.src_weights,
                dst_weights=near.dst_ranks,
                name=self.name(block),
            )
        self.bytes_sent += len(near.dst_ranks) * block.flat.nbytes

    def settle(self) -> None:
        """Wait for all averages; they are taken when their step comes."""
        self._under_way.wait()

    def finish(self, step: int) -> None:
        """Take what is under way."""
        for block in self.blocks:
            if block.number in self._under_way:
                self.mix(block, step)

    def renew(self, *, mixed: bool) -> None:
        """Forget what is under way; the next backward pass sends the new values, unless mixed."""
        self.settle()
        self._under_way.clear()
        self._mixed = {block.number for block in self.blocks} if mixed else set()

    def close(self) -> None:
        """Wait until nobody reads the parameters any more, so that they are the user's."""
        self._under_way()
        self._under_way.clear()


class _UnderWay(dict[int, Handle[torch.Tensor]]):
    """Messages by block: a rank does not leave the world before its neighbours have them.

    Args:
        owner: Whose; it may be gone when the rank leaves.
    """

    def __init__(self, owner: Synchronous) -> None:
        super().__init__()
        self._owner = ref(owner)
        farewells = owner.context.farewells
        farewells[:] = [one for one in farewells if not (isinstance(one, _UnderWay) and one.over)]
        farewells.append(self)

    @property
    def over(self) -> bool:
        """Whether nobody will ever ask for it."""
        return self._owner() is None and all([handle.poll() for handle in self.values()])

    def wait(self) -> None:
        """Wait for all.

        Raises:
            PeerError: A neighbour failed, or does something else.
        """
        for handle in self.values():
            handle.wait()

    def __call__(self) -> None:
        """Wait for all that can still come."""
        with suppress(PeerError, NotInitializedError):
            self.wait()
