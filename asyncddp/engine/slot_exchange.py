"""Collectives in shared memory, where all ranks compare their calls and post small tensors.

If all ranks of a world or group share memory, each first posts a digest of its call, with its data
if these are small. If the digests agree, all ranks have called the same collective, and small data
need not be sent. If they differ, all ranks exchange messages, which identify the differing calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from msgspec import Struct
from msgspec.structs import astuple

from asyncddp.engine.messages import ExchangeSignature, MatchKey
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.engine.started_collective import StartedCollective, run_collective
from asyncddp.errors import PeerError
from asyncddp.shm.collective_slots import DIFFERENT, SLOTS, CollectiveSlots
from asyncddp.tensors.byte_views import has_plain_memory, on_host

R = TypeVar("R")
S = TypeVar("S")
_Steps: TypeAlias = Generator[Any, None, R]
Combine: TypeAlias = Callable[[Sequence[torch.Tensor], Any, torch.Tensor | None], R]
Start: TypeAlias = Combine[StartedCollective[R]]


class SlotExchange(Struct, Generic[R], frozen=True, dict=True):
    """Description of a shared-memory collective, reused by all calls of one name, dtype and shape.

    Attributes:
        signature: The signature, which must be the same on all ranks.
        combine: Computes the result from the data of all ranks in rank order, this rank's own
            tensor, and the output tensor or None. It is None if the slots serve only to compare
            signatures, and data are exchanged otherwise.
        dtype: Dtype of the data in slots.
        shape: Shape of a rank's data, with -1 for a size that may differ between ranks.
        gives: Whether this rank contributes data.
        start: Starts the transport's collective once the ranks agree, if there is no
            ``combine``; it takes the same arguments.
        counts: Data for ``start`` that are posted in place of tensors, such as numbers of rows.
    """

    signature: ExchangeSignature
    combine: Combine[R] | None = None
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = (-1,)
    gives: bool = True
    start: Start[R] | None = None
    counts: torch.Tensor | None = None

    @cached_property
    def digest(self) -> int:
        """Hash of the signature, which ranks compare."""
        facts = astuple(self.signature), self.combine is not None, self.start is not None
        return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little") or 1

    def data_of(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """Return the contiguous data that this rank writes into its slot; None if it has none."""
        if self.combine is None:
            return self.counts
        if given is None or not self.gives:
            return None
        if given.dtype is not self.dtype or not has_plain_memory(given):
            return on_host(given).to(self.dtype)
        return given


class SlotCall(Struct, Generic[R], frozen=True):
    """Call of a shared-memory collective: its description, with input and output tensor."""

    exchange: SlotExchange[R]
    given: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def then(self, convert: Callable[[R], S]) -> SlotCall[S]:
        """Return the same collective with a converted result."""
        exchange, combine, start = self.exchange, self.exchange.combine, self.exchange.start
        converted: SlotExchange[S] = SlotExchange(
            exchange.signature,
            combine and (lambda *given: convert(combine(*given))),
            exchange.dtype,
            exchange.shape,
            exchange.gives,
            start and (lambda *given: start(*given).then(convert)),
            exchange.counts,
        )
        return SlotCall(converted, self.given, self.out)


class _SlotRoomCondition:
    """Wait condition: all ranks have read this rank's earlier data, so it may post new data."""

    def __init__(self, slots: CollectiveSlots, key: MatchKey) -> None:
        self._slots, self._key = slots, key

    def done(self) -> bool:
        return self._slots.has_room(self._slots.first + self._key.step)

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the ranks that have not read the earlier data, with the step of these data."""
        step = self._key.step
        earlier = MatchKey(self._key.name, step - SLOTS)
        return [(peer, earlier) for peer in self._slots.unread(self._slots.first + step)]


class SlotsCondition:
    """Wait condition: all ranks have posted to their slots, or one has called something else."""

    def __init__(self, slots: CollectiveSlots, key: MatchKey, digest: int) -> None:
        self._slots, self._key, self._digest = slots, key, digest
        self._step = slots.first + key.step

    def done(self) -> bool:
        """Return whether it holds."""
        return self._slots.all_posted(self._step) or self._slots.differs(self._step, self._digest)

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the ranks that have not posted yet, with the match key."""
        return [(peer, self._key) for peer in self._slots.late(self._step)]

    def joined(self) -> list[int]:
        """Return the other ranks that have posted."""
        return self._slots.joined(self._step)


def exchange_in_slots(
    slots: CollectiveSlots,
    op: OperationExchanges,
    call: SlotCall[R] | None,
    steps: _Steps[R],
) -> _Steps[R]:
    """Run a collective through slots as far as possible, otherwise by its steps.

    ``call`` is None if this collective does not use slots, which is then posted to all ranks.
    """
    step = slots.first + op.key.step
    if not slots.has_room(step):
        yield _SlotRoomCondition(slots, op.key)
    if call is None:
        slots.post(step, DIFFERENT)
        slots.finish(step)
        return (yield from steps)
    begun, exchange = time.monotonic_ns(), call.exchange
    slots.post(step, exchange.digest, exchange.data_of(call.given))
    try:
        yield SlotsCondition(slots, op.key, exchange.digest)
        op.agreed = slots.all_posted(step) and slots.agree(step, exchange.digest)
        op.differs = not op.agreed
        if op.agreed and exchange.combine is not None:
            parts = slots.read(step, exchange.dtype, exchange.shape)
            result = exchange.combine(parts, call.given, call.out)
            op.record_collective(op.key, exchange.signature, slots.ranks, begun)
            steps.close()
            return result
        if op.agreed and exchange.start is not None:
            parts = [part.clone() for part in slots.read(step, exchange.dtype, exchange.shape)]
            start = partial(exchange.start, parts, call.given, call.out)
            steps.close()
            steps = run_collective(op, slots.ranks, exchange.signature, start)
    except GeneratorExit:  # it has failed meanwhile: ranks that come later are told by messages
        slots.withdraw(step)
        op.open_for_refusal(exchange.signature, slots.ranks)
        raise
    finally:
        slots.finish(step)
    return (yield from steps)


def interrupted_steps(slots: CollectiveSlots, op: OperationExchanges, what: str) -> _Steps[Any]:
    """Fail a collective that was interrupted after its post to slots, and notify the others."""
    step = slots.first + op.key.step
    slots.withdraw(step)
    slots.finish(step)
    op.open_for_refusal(ExchangeSignature(op.verb, "uint8", ()), slots.ranks)
    yield from ()
    raise PeerError(f"rank {op.rank}: {what} was interrupted")
