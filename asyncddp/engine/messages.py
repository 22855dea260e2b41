"""The short messages between engines, and their bytes.

On the wire a bundle is a MessagePack array of messages, and a message an array of its kind's number
and its fields. Reading one checks the type of every field and executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from asyncddp.memory.dtypes import DTYPES
from asyncddp.memory.shared import Place

__all__ = [
    "COLLECTIVE",
    "FORM",
    "MACHINE_COLLECTIVE",
    "UNREADABLE",
    "Circle",
    "Confirm",
    "Data",
    "Facts",
    "Key",
    "Leave",
    "Message",
    "Parcel",
    "Probe",
    "Refuse",
    "Waiting",
    "decode",
    "encode",
]

COLLECTIVE = "<collective>"
"""The name under which ordered verbs are counted, whatever the user calls them."""

MACHINE_COLLECTIVE = "<collective of the machine>"
"""The same for those among the ranks of one machine, which meet as often as they like."""


class Key(NamedTuple):
    """What both sides of an exchange call it: a name, and how often it was used before."""

    name: str
    step: int

    @property
    def base(self) -> str:
        """The name without the number of the part, where a collective has several."""
        return self.name.partition("/")[0] if self.name.startswith("<") else self.name

    @property
    def collective(self) -> bool:
        """Whether it is an ordered verb's."""
        return self.base in (COLLECTIVE, MACHINE_COLLECTIVE)

    def __str__(self) -> str:
        if self.collective:
            return f"({self.base[1:-1]}, number {self.step})"
        return f"{self.name!r} (use {self.step})"


FORM = -1
"""The tag of :class:`Data` that announces its exchange's form, without a tensor."""

UNREADABLE = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, OSError,
    MemoryError,
)  # fmt: skip
"""What a message that contradicts itself may raise in whoever takes it."""

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Facts: TypeAlias = tuple[bool | int | float | str | None, ...]
"""What a parcel may say to a service."""


class _Kind(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What all kinds of messages share."""


class Data(_Kind, frozen=True, tag=0):
    """A tensor, or the announcement of one that follows as bulk bytes under ``tag``."""

    key: Key
    verb: str
    dtype: str
    shape: tuple[_Size, ...]
    payload: bytes | None
    tag: int
    confirm: bool = False  # the sender waits for a Confirm
    mutual: bool = False  # the sender expects data from the receiver under the same key
    lane: Place | None = None  # where the receiver finds what comes later under this name and form
    device: str = "cpu"  # the kind of device that the tensor lies on
    weights: str = ""  # the receiver's row of W by the sender's topology, in check mode


class Confirm(_Kind, frozen=True, tag=1):
    """Data under this key was expected and fits."""

    key: Key


class Refuse(_Kind, frozen=True, tag=2):
    """The exchange under this key failed on the sending rank; the reason says why."""

    key: Key
    reason: str
    kind: str = "MismatchError"  # the class of error that is raised on all who wait
    origin: int = -1  # the rank where it began


class Waiting(NamedTuple):
    """A link of a chain: ``rank`` waits in ``verb`` until the next rank submits ``key``."""

    rank: int
    verb: str
    key: Key


class Probe(_Kind, frozen=True, tag=3):
    """A chain of waiting ranks that asks its receiver: do you wait as well?"""

    chain: tuple[Waiting, ...]


class Circle(_Kind, frozen=True, tag=4):
    """A chain that has closed, told to everybody in it: nobody of you can ever go on."""

    chain: tuple[Waiting, ...]


class Leave(_Kind, frozen=True, tag=5):
    """The sending rank has ended; it had joined so many collectives of each kind, and no more."""

    reason: str
    joined: Mapping[str, int]


class Parcel(_Kind, frozen=True, tag=6):
    """Something for a service of the receiver; a tensor may be inside, or follow by ``tag``."""

    service: str
    content: Facts
    dtype: str
    shape: tuple[_Size, ...]
    payload: bytes | None
    tag: int


Message: TypeAlias = Data | Confirm | Refuse | Probe | Circle | Leave | Parcel

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Message])
_ITEM_SIZES = {row.name: dtype.itemsize for dtype, row in DTYPES.items()}


def encode(messages: Iterable[Message]) -> bytes:
    """Pack messages for one peer; they are unpacked in the same order."""
    every = list(messages)
    try:
        return _ENCODER.encode(every)
    except UnicodeEncodeError:  # a reason may quote a file name that is no UTF-8
        return _ENCODER.encode([_in_utf8(message) for message in every])


def decode(data: bytes) -> list[Message]:
    """Unpack what :func:`encode` packed.

    Raises:
        ValueError: These bytes are no messages of the known kinds, or one contradicts itself.

    Example:
        >>> decode(encode([Confirm(Key("x", 3))]))
        [Confirm(key=Key(name='x', step=3))]
    """
    try:
        messages = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    for message in messages:
        if isinstance(message, (Data, Parcel)):
            _check_tensor(message)
        elif isinstance(message, (Probe, Circle)) and not message.chain:
            raise ValueError(f"{type(message).__name__} of an empty chain")
    return messages


def _check_tensor(message: Data | Parcel) -> None:
    """Insist that a dtype is known, and that the bytes inside a message fill the shape."""
    size = _ITEM_SIZES.get(message.dtype)
    if size is None:
        if isinstance(message, Parcel) and not message.dtype and message.payload is None:
            return
        raise ValueError(f"unknown dtype {message.dtype!r}")
    payload = message.payload
    if payload is None or (message.tag == FORM and isinstance(message, Data) and not payload):
        return
    expected = math.prod(message.shape) * size
    if len(payload) != expected:
        shape = tuple(message.shape)
        raise ValueError(f"{len(payload)} bytes for {expected} of {message.dtype} in shape {shape}")


def _in_utf8(message: Message) -> Message:
    """The same message, with escapes in place of what UTF-8 cannot encode."""
    texts = {
        name: value.encode("utf-8", "backslashreplace").decode()
        for name, value in msgspec.structs.asdict(message).items()
        if isinstance(value, str)
    }
    return msgspec.structs.replace(message, **texts)
