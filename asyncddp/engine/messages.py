"""Messages between the progress engines of ranks: message types, match keys, encoding.

On the transport, a bundle is a MessagePack array of messages, and a message is an array of its tag
and its fields. Decoding checks the type of every field and executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from typing_extensions import override

from asyncddp.errors import (
    DeadlockError,
    MismatchError,
    NonFiniteError,
    PeerError,
    PeerLeftError,
    WaitTimeoutError,
)
from asyncddp.membership import MembershipMessage
from asyncddp.membership.messages import MessageStruct
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.tensors.tensor_lists import describe_difference

# names by which collectives of all ranks, of one machine and of a group are counted and matched
COLLECTIVE, MACHINE_COLLECTIVE = "<collective>", "<collective of the machine>"
GROUP_COLLECTIVE = "<collective of group {}>"
MACHINE_OF_VIEW = "<collective of the machine since view {}>"


class MatchKey(NamedTuple):
    """Match key of an exchange, equal on all its ranks: a name and its number of earlier uses."""

    name: str
    step: int

    @property
    def base(self) -> str:
        """Name of the operation, without the number of the exchange if it makes several."""
        name, _, part = self.name.rpartition("/")
        return name if name and part.isdecimal() else self.name

    @property
    def collective(self) -> bool:
        """True if this is the key of a collective."""
        return self.name.startswith("<collective")

    def __str__(self) -> str:
        if self.collective:
            return f"({self.base[1:-1]}, number {self.step})"
        return f"{self.name!r} (use {self.step})"


SIGNATURE_ONLY = -1
"""Tag of a :class:`TensorMessage` that carries the signature of its exchange, but no tensor."""

DECODE_ERRORS = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, OSError,
    MemoryError,
)  # fmt: skip
"""Exceptions that handling a malformed message may raise."""

_SENDABLE_ERRORS: dict[str, type[PeerError]] = {
    kind.__name__: kind
    for kind in (
        DeadlockError,
        MismatchError,
        NonFiniteError,
        PeerError,
        PeerLeftError,
        WaitTimeoutError,
    )
}
"""Errors that a :class:`Nack` can carry, so that peers raise the same error as the failed rank."""

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
HandlerArguments: TypeAlias = tuple[bool | int | float | str | None, ...]
"""Arguments of an active message's handler."""


class TensorMessage(MessageStruct, frozen=True, tag=0):
    """Header of a tensor, with the tensor's bytes or the tag of the transfer that follows."""

    key: MatchKey
    verb: str
    dtype: str
    shape: tuple[_Size, ...]
    payload: bytes | None
    tag: int
    wants_ack: bool = False  # the sender waits for an Ack
    mutual: bool = False  # the sender expects a tensor from the receiver under the same key
    send_ring: SharedMemoryHandle | None = None  # the ring that carries later steps
    device: str = "cpu"  # the kind of device that the tensor is on
    weights: str = ""  # the receiver's row of W by the sender's topology, in check mode
    members: str = ""  # the tensors of which it is made, where it is made of a list


class Ack(MessageStruct, frozen=True, tag=1):
    """Acknowledgement: the receiver expects the announced tensor, with the same dtype and shape."""

    key: MatchKey


class Nack(MessageStruct, frozen=True, tag=2):
    """Negative acknowledgement: tells a peer that the exchange has failed on this rank, and why."""

    key: MatchKey
    reason: str
    kind: str = "MismatchError"  # the class of error to raise on all ranks that wait
    origin: int = -1  # the rank where the failure began
    told_all: bool = False  # the sender has told all ranks of the collective

    @classmethod
    def of(
        cls,
        rank: int,
        key: MatchKey,
        error: PeerError,
        reason: str = "",
        *,
        told_all: bool = False,
    ) -> Nack:
        """Make the nack of an exchange that failed on this rank, by default with its error."""
        origin = rank if error.origin is None else error.origin
        kind = type(error).__name__
        kind = kind if kind in _SENDABLE_ERRORS else "PeerError"
        return cls(key, reason or str(error), kind, origin, told_all)

    def to_error(self, rank: int, what: str, peer: int) -> PeerError:
        """Make the error that this rank raises after a peer's nack of ``what``."""
        kind = _SENDABLE_ERRORS.get(self.kind, PeerError)
        did = "refused" if issubclass(kind, MismatchError) else "given up"
        error = kind(f"rank {rank}, {what}, {did} by rank {peer}: {self.reason}")
        error.origin = self.origin if self.origin >= 0 else peer
        return error


def mismatch_found_by(rank: int, problem: str) -> MismatchError:
    """Make a MismatchError that records the rank that has found the mismatch as its origin."""
    error = MismatchError(problem)
    error.origin = rank
    return error


class WaitForEdge(NamedTuple):
    """Edge of the wait-for graph: a blocked rank, its operation, and the call that it waits for."""

    rank: int
    verb: str
    key: MatchKey


class DeadlockProbe(MessageStruct, frozen=True, tag=3):
    """Probe for deadlocks: blocked ranks forward it, each adding its wait-for edge."""

    chain: tuple[WaitForEdge, ...]


class DeadlockCycle(MessageStruct, frozen=True, tag=4):
    """Notice to deadlocked ranks: the cycle of ranks that wait for each other."""

    chain: tuple[WaitForEdge, ...]


class ExitAnnouncement(MessageStruct, frozen=True, tag=5):
    """Announcement that the sending rank exits, with its number of submitted collectives."""

    reason: str
    collective_counts: Mapping[str, int]


class ActiveMessage(MessageStruct, frozen=True, tag=6):
    """One-sided message that runs a handler on the receiving rank, optionally with a tensor."""

    handler: str
    arguments: HandlerArguments
    dtype: str
    shape: tuple[_Size, ...]
    payload: bytes | None
    tag: int


Message: TypeAlias = (
    TensorMessage
    | Ack
    | Nack
    | DeadlockProbe
    | DeadlockCycle
    | ExitAnnouncement
    | ActiveMessage
    | MembershipMessage
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Message])
_ITEM_SIZES = {row.name: dtype.itemsize for dtype, row in DTYPES.items()}


def encode(messages: Iterable[Message]) -> bytes:
    """Encode messages for one peer as a bundle, in their order."""
    every = list(messages)
    try:
        return _ENCODER.encode(every)
    except UnicodeEncodeError:  # a reason may quote a file name that is no UTF-8
        return _ENCODER.encode([_in_utf8(message) for message in every])


def decode(data: bytes) -> list[Message]:
    """Decode a bundle of messages; raise ValueError if one is malformed or inconsistent."""
    try:
        messages = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    for message in messages:
        if isinstance(message, (TensorMessage, ActiveMessage)):
            _check_tensor(message)
        elif isinstance(message, (DeadlockProbe, DeadlockCycle)) and not message.chain:
            raise ValueError(f"{type(message).__name__} of an empty chain")
    return messages


def _check_tensor(message: TensorMessage | ActiveMessage) -> None:
    """Raise a ValueError unless the dtype is known and the payload has the size of the shape."""
    size = _ITEM_SIZES.get(message.dtype)
    if size is None:
        if isinstance(message, ActiveMessage) and not message.dtype and message.payload is None:
            return
        raise ValueError(f"unknown dtype {message.dtype!r}")
    payload = message.payload
    if payload is None or (
        message.tag == SIGNATURE_ONLY and isinstance(message, TensorMessage) and not payload
    ):
        return
    expected = math.prod(message.shape) * size
    if len(payload) != expected:
        shape = tuple(message.shape)
        raise ValueError(f"{len(payload)} bytes for {expected} of {message.dtype} in shape {shape}")


def _in_utf8(message: Message) -> Message:
    """Copy a message with characters escaped that UTF-8 cannot encode."""
    texts = {
        name: value.encode("utf-8", "backslashreplace").decode()
        for name, value in msgspec.structs.asdict(message).items()
        if isinstance(value, str)
    }
    return msgspec.structs.replace(message, **texts)


class ExchangeSignature(msgspec.Struct, frozen=True):
    """Properties that both sides of an exchange must share: operation, dtype, shape and device.

    ``members`` describes the list of tensors on which the operation is called, if there is one.
    """

    verb: str
    dtype: str
    shape: tuple[int | None, ...]  # with None in place of a size that may differ between ranks
    device: str = "cpu"
    members: str = ""

    def difference(self, message: TensorMessage) -> str | None:
        """Describe a message's difference as "expected …, got …"; None if it agrees."""
        if message.verb != self.verb:
            return f"expected verb {self.verb}, got {message.verb}"
        if message.members != self.members:
            return describe_difference(self.members, message.members)
        if message.dtype != self.dtype:
            return f"expected dtype {self.dtype}, got {message.dtype}"
        if message.device != self.device:
            return f"expected a tensor on {self.device}, got one on {message.device}"
        if len(message.shape) != len(self.shape) or any(
            want is not None and want != have
            for want, have in zip(self.shape, message.shape, strict=True)
        ):
            return f"expected shape {_format_shape(self.shape)}, got {_format_shape(message.shape)}"
        return None


class AnyTensorSignature(ExchangeSignature, frozen=True):
    """Properties of a receive that accepts a tensor of any dtype and shape."""

    @override
    def difference(self, message: TensorMessage) -> str | None:
        shape = tuple(message.shape)
        alike = ExchangeSignature(self.verb, message.dtype, shape, self.device)
        return alike.difference(message)


def _format_shape(shape: Iterable[int | None]) -> str:
    """Format a shape as Python does, ``(3,)``, with ``any`` for sizes that may differ."""
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
