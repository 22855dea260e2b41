"""Work: an operation in progress, which runs as a generator that yields wait conditions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import torch
from msgspec import Struct
from msgspec.structs import replace

from asyncddp.deadline import Deadline
from asyncddp.device.stream_interfaces import StreamOrdering
from asyncddp.engine.exchange_request import ShortMessage
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE, MatchKey
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.engine.slot_exchange import SlotCall, SlotExchange, SlotsCondition, exchange_in_slots
from asyncddp.errors import ArgumentError, NotInitializedError, PeerError, PeerLeftError
from asyncddp.torch_modes import inference_mode

PROBE_AFTER = 0.25
"""Seconds of waiting after which peers are probed for a deadlock."""


class WaitCondition(Protocol):
    """Interface of a condition that an operation waits for, such as completion of a send."""

    def done(self) -> bool:
        """Return whether the condition holds; raise an error that fails the operation."""
        ...

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the peers that the operation waits for, with the key that each must submit."""
        ...


R = TypeVar("R")
S = TypeVar("S")
Steps: TypeAlias = Generator[WaitCondition, None, R]
"""Generator that runs an operation: it yields its wait conditions, and returns the result.
"""


def require_name(verb: str, name: object) -> None:
    """Raise an ArgumentError unless a name is None or a string that UTF-8 can encode."""
    if name is None:
        return
    if not isinstance(name, str):
        raise ArgumentError(f"{verb}: argument name: expected a string, got {name!r}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"{verb}: argument name: expected a text that UTF-8 can encode, got {name!r}"
            ) from error


class OperationSpec(Struct, Generic[R], frozen=True):
    """Specification of an operation: its type, such as allreduce, its name, steps and options."""

    verb: str
    steps: Callable[[OperationExchanges], Steps[R]]  # creates the generator that runs it
    name: str | None = None  # the user's name for this call, or None: matched by call order
    ordered: bool = False  # all ranks must submit it in the same order, as collectives are
    overlaps: bool = False  # the next in that order may start while this one is under way
    group: str = COLLECTIVE  # being ordered, the name by which its ranks' collectives are counted
    check: bool = False  # peers must acknowledge before it counts as done
    stream_ordering: StreamOrdering | None = None  # with a device's streams; None on the host
    slot_call: SlotCall[R] | None = None  # how a collective is done in slots of shared memory
    message: ShortMessage | None = None  # all that it sends or receives, if that is one
    members: str = ""  # the list of tensors that it is called on, if it is one
    timeout: float | None = None  # seconds of its own deadline; None for the configured one
    begun: bool = False  # part of a round that has begun, which no agreement on a view holds up
    again: Callable[[], OperationSpec[R]] | None = None  # plans it anew if a rank leaves meanwhile
    on_end: Callable[[BaseException | None], object] | None = None  # called under the engine's lock

    def __post_init__(self) -> None:
        """Raise an ArgumentError unless the name can be encoded."""
        if self.name is not None:
            require_name(self.verb, self.name)

    def then(self, convert: Callable[[R], S]) -> OperationSpec[S]:
        """Return the same operation with a converted result."""

        def steps(op: OperationExchanges) -> Steps[S]:
            return convert((yield from self.steps(op)))

        call = None if self.slot_call is None else self.slot_call.then(convert)
        return cast("OperationSpec[S]", replace(self, steps=steps, slot_call=call, message=None))

    @property
    def label(self) -> str:
        """Name of the call; unnamed calls of a verb share a default name."""
        return self.name or f"{self.verb}.noname"

    @property
    def match_name(self) -> str:
        """Name under which peers match the operation: its group if ordered, else its label."""
        return self.group if self.ordered else self.label

    @property
    def sequence(self) -> str | None:
        """Sequence of operations that run one after another; None if it runs concurrently."""
        if not self.ordered:
            return None
        return COLLECTIVE if self.group == MACHINE_COLLECTIVE else self.group


def in_sequence(specs: Sequence[OperationSpec[R]]) -> OperationSpec[list[R]]:
    """Join operations into one that runs their steps in turn; ranks compare the first one only."""
    first = specs[0]

    def steps(op: OperationExchanges) -> Steps[list[R]]:
        results = []
        for spec in specs:
            results.append((yield from spec.steps(op)))
        return results

    call: SlotCall[list[R]] | None = None
    if first.slot_call is not None:
        call = SlotCall(SlotExchange(first.slot_call.exchange.signature))
    joined = replace(first, steps=steps, slot_call=call, message=None, overlaps=False)
    return cast("OperationSpec[list[R]]", joined)


class Work(Generic[R]):
    """Operation in progress: its steps, wait condition, deadline, and result or error."""

    def __init__(
        self,
        spec: OperationSpec[R],
        operation: OperationExchanges,
        deadline: Deadline,
        members: Sequence[int] = (),
    ) -> None:
        self.members = members  # of the view in which it is made, where the run is elastic
        self.spec, self.deadline = spec, deadline
        self.next_probe, self.times_probed = deadline.started + PROBE_AFTER, 0
        self.result: R | None = None
        self.error: BaseException | None = None
        self.finished = self._interrupted = self._discarded = False
        self.has_stepped, self._moves = False, 0  # since it was last asked; by pieces so far
        self._inference = torch.is_inference_mode_enabled()
        self._begin(operation)

    def _begin(self, operation: OperationExchanges) -> None:
        spec, self.operation = self.spec, operation
        self.sequence = spec.sequence
        steps, stream_ordering = spec.steps(operation), spec.stream_ordering
        slots = operation.slots_of(spec.group) if spec.ordered else None
        self._overlaps = spec.overlaps and slots is None
        if slots is not None:
            steps = exchange_in_slots(slots, operation, spec.slot_call, steps)
        self._steps = steps if stream_ordering is None else _in_order(stream_ordering, steps)
        self._waiting: WaitCondition | None = None

    @property
    def key(self) -> MatchKey:
        """Match key of this call."""
        return self.operation.key

    @property
    def next_may_start(self) -> bool:
        """True if the next operation of the sequence may start before this one ends."""
        return self._overlaps and self.operation.next_may_start

    def describe(self) -> str:
        """Format verb, name and key for messages."""
        name = f" {self.spec.name!r}" if self.spec.ordered and self.spec.name else ""
        return f"{self.spec.verb}{name} {self.key}"

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the peers that the operation waits for, with the key that each must submit."""
        if self._waiting is None or self._interrupted:
            return []
        return self._waiting.missing()

    def joined(self) -> list[int]:
        """Return the other ranks that are known to have called the same collective."""
        known = getattr(self._waiting, "joined", None)
        return [] if known is None else known()

    def advance(self) -> bool:
        """Run the operation as far as possible without waiting; return whether it has ended.

        ``torch.inference_mode`` is set as in the thread that made the call.
        """
        if self.finished or self._interrupted:
            return self.finished
        with inference_mode(enabled=self._inference):
            try:
                self.operation.raise_if_failed()
                while self._waiting is None or self._waiting.done():
                    self._waiting = next(self._steps)
                    self.has_stepped = True
            except StopIteration as stop:
                self._end(stop.value, None)
            except Exception as error:  # noqa: BLE001 - raised where the call is waited for
                self.fail(error)
        return self.finished

    def pieces_moved(self) -> bool:
        """Return whether transfers in pieces have progressed since the last call."""
        before, self._moves = self._moves, self.operation.count_moves()
        return self._moves != before

    def fail(self, error: BaseException) -> None:
        """End the operation with an error, and notify the peers.

        One that can be planned anew, and failed because a member has left, waits for the next view.
        """
        again = self.spec.again is not None and not self._interrupted
        if again and isinstance(error, PeerLeftError) and error.origin in {None, *self.members}:
            self.interrupt()
            return
        with suppress(Exception):  # a device that has failed refuses this, too
            self._steps.close()
        self._end(None, error)

    def interrupt(self) -> None:
        """Stop the operation until it is resumed or restarted; peers are not notified.

        What it has posted to slots, for ranks that end the collective, stays until it is discarded.
        """
        if not (self.finished or self._interrupted):
            self._interrupted = True
            if not (self._waiting is None or isinstance(self._waiting, SlotsCondition)):
                self.discard()

    def discard(self) -> None:
        """Drop what an interrupted operation has exchanged so far."""
        self._waiting, self._discarded = None, True
        with suppress(Exception):
            self._steps.close()
        self.operation.close(PeerLeftError("interrupted"))

    def resume(self) -> bool:
        """Go on with an interrupted operation where that can be; return whether it has ended."""
        self._interrupted = self._discarded
        return self.advance()

    def restart(
        self, spec: OperationSpec[R], operation: OperationExchanges, members: Sequence[int]
    ) -> None:
        """Begin an interrupted operation anew by another plan, among the members of a new view."""
        self.spec, self.members, self._interrupted, self._discarded = spec, members, False, False
        self._begin(operation)

    def end_after_fork(self, error: BaseException) -> None:
        """End the operation with an error in a forked process, without notifying peers."""
        self.error = error
        self.finished = True

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        try:
            if error is not None and not isinstance(error, PeerError):  # peers raise one as well
                left = isinstance(error, NotInitializedError)
                error = (PeerLeftError if left else PeerError)(str(error))
            self.operation.close(error)
        finally:
            if self.spec.on_end is not None:
                self.spec.on_end(self.error)
            self.finished = True


def _in_order(stream_ordering: StreamOrdering, steps: Steps[R]) -> Steps[R]:
    """Run steps with their device work on the operation's streams, in stream order."""
    stream_ordering.begin()
    try:
        while True:
            with stream_ordering.stream_context():
                try:
                    wait = next(steps)
                except StopIteration as stop:
                    result: R = stop.value
                    return result
            yield wait
    finally:
        steps.close()
        stream_ordering.end()
