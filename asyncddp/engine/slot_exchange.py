"""Collectives through slots of shared memory: ranks agree on what they call, and share little data.

All ranks of a world on one machine post a digest of what they call, before anything else. Where the
digests agree, they know that it is the same collective, and if each has given its data, these are
there: nothing else is sent. Where they do not, all go the way of messages, which tell whose call is
another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.errors import PeerError
from asyncddp.shm.collective_slots import DIFFERENT, CollectiveSlots

R = TypeVar("R")
_Steps: TypeAlias = Generator[Any, None, R]


@dataclass(frozen=True)
class SlotExchange(Generic[R]):
    """What a collective gives to slots, and makes of what all ranks have given.

    Attributes:
        signature: What must be the same on all ranks.
        combine: Makes the result of all ranks' data, as flat views in their order; None where the
            ranks agree on the signature by slots and exchange data otherwise.
        data: Contiguous tensor on the host that this rank gives; None for nothing.
        dtype: Of the data that are read.
    """

    signature: ExchangeSignature
    combine: Callable[[Sequence[torch.Tensor]], R] | None = None
    data: torch.Tensor | None = None
    dtype: torch.dtype = torch.uint8

    @property
    def digest(self) -> int:
        """Number that ranks compare in place of the signature."""
        return _digest(self.signature, self.combine is not None)


@lru_cache(1024)
def _digest(signature: ExchangeSignature, gives_data: bool) -> int:
    facts = signature.verb, signature.dtype, signature.shape, signature.device, gives_data
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little") or 1


class _SlotRoomCondition:
    """Wait condition: all ranks have read what was in the slot of a step."""

    def __init__(self, slots: CollectiveSlots, key: MatchKey) -> None:
        self._slots, self._key = slots, key

    def done(self) -> bool:
        return self._slots.has_room(self._key.step)

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the ranks that have yet to read it, with the step that they have yet to make."""
        earlier = MatchKey(self._key.name, self._slots.step_before(self._key.step))
        return [(peer, earlier) for peer in self._slots.unread(self._key.step)]


class _SlotsCondition:
    """Wait condition: all ranks have posted to a step, or one has posted another digest."""

    def __init__(self, slots: CollectiveSlots, key: MatchKey, digest: int) -> None:
        self._slots, self._key, self._digest = slots, key, digest

    def done(self) -> bool:
        step = self._key.step
        return self._slots.all_posted(step) or self._slots.differs(step, self._digest)

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the ranks that have not posted."""
        return [(peer, self._key) for peer in self._slots.late(self._key.step)]

    def joined(self) -> list[int]:
        """Return the ranks that have posted."""
        return self._slots.joined(self._key.step)


def exchange_in_slots(
    slots: CollectiveSlots,
    op: OperationExchanges,
    exchange: SlotExchange[R] | None,
    steps: _Steps[R],
) -> _Steps[R]:
    """Run a collective in slots as far as possible, and otherwise by its steps.

    ``exchange`` is None for a collective without use for slots, which the others must know.
    """
    step = op.key.step
    if not slots.has_room(step):
        yield _SlotRoomCondition(slots, op.key)
    if exchange is None:
        slots.post(step, DIFFERENT)
        slots.finish(step)
        return (yield from steps)
    begun = time.monotonic_ns()
    slots.post(step, exchange.digest, exchange.data)
    try:
        yield _SlotsCondition(slots, op.key, exchange.digest)
        op.agreed = slots.all_posted(step) and slots.agree(step, exchange.digest)
        if op.agreed and exchange.combine is not None:
            result = exchange.combine(slots.read(step, exchange.dtype))
            op.record_collective(op.key, exchange.signature, op.everyone, begun)
            steps.close()
            return result
    except GeneratorExit:  # it has failed meanwhile: ranks that come later are told by messages
        slots.withdraw(step)
        op.open_for_refusal(exchange.signature)
        raise
    finally:
        slots.finish(step)
    return (yield from steps)


def interrupted_steps(slots: CollectiveSlots, op: OperationExchanges, what: str) -> _Steps[Any]:
    """Fail a collective that was interrupted after it had begun in slots, and tell the others."""
    slots.withdraw(op.key.step)
    slots.finish(op.key.step)
    op.open_for_refusal(ExchangeSignature(op.verb, "uint8", ()))
    yield from ()
    raise PeerError(f"rank {op.rank}: {what} was interrupted")
