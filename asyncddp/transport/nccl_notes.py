"""What two ranks tell each other about the messages that NCCL is to carry between them.

The one of lower number *leads*: it makes the communicator's identity and decides the order. The
other one *follows*: it says what it has, and does what it is told, in that order.

==============  =========  =========================================================
note            goes from  says
==============  =========  =========================================================
Hello           follower   let us open a communicator, if I have room for one
Identity        leader     open it with this identity
Declined        leader     one of us has no room: stage what goes between us
Ready           follower   this is ready here
Batch           leader     enter these now, in this order; I do so
Differs         leader     your size is not mine
Withdraw        follower   I do not want this any more, unless you have entered it
Withdrawn       leader     forget it
Broken          both       the communicator is of no use any more, and why
==============  =========  =========================================================
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

from asyncddp.errors import PeerError
from asyncddp.memory.packing import pack, unpack

__all__ = [
    "Batch",
    "Broken",
    "Declined",
    "Differs",
    "Hello",
    "Identity",
    "Note",
    "Ready",
    "Withdraw",
    "Withdrawn",
    "read",
    "written",
]


class Hello(NamedTuple):
    """The follower has something for the leader, or wants something of it."""

    room: bool


class Identity(NamedTuple):
    """How both open their communicator."""

    identity: bytes


class Declined(NamedTuple):
    """There is to be no communicator."""


class Ready(NamedTuple):
    """The follower has begun a send or a receive.

    Attributes:
        number: Its number there.
        sends: Whether it is a send.
        tag: Its tag.
        size: Its bytes.
    """

    number: int
    sends: bool
    tag: int
    size: int


class Batch(NamedTuple):
    """Numbers of what the follower enters, in one group and in this order."""

    numbers: tuple[int, ...]


class Differs(NamedTuple):
    """What the follower has under this number has another size at the leader."""

    number: int
    size: int


class Withdraw(NamedTuple):
    """The follower has given a receive up."""

    number: int


class Withdrawn(NamedTuple):
    """It has not been entered, and will not be."""

    number: int


class Broken(NamedTuple):
    """Messages cannot go on."""

    why: str


Note: TypeAlias = (
    Hello | Identity | Declined | Ready | Batch | Differs | Withdraw | Withdrawn | Broken
)

_KINDS: tuple[type[Note], ...] = (
    Hello, Identity, Declined, Ready, Batch, Differs, Withdraw, Withdrawn, Broken,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def written(note: Note) -> bytes:
    """A note as bytes.

    Example:
        >>> read(written(Batch((3, 1))), peer=0)
        Batch(numbers=(3, 1))
    """
    return pack((_NUMBERS[type(note)], note))


def read(data: bytes, peer: int) -> Note:
    """A note from its bytes.

    Raises:
        PeerError: These bytes of a peer are no note.
    """
    what = f"what rank {peer} says of its messages by NCCL"
    number, fields = unpack(data, tuple[int, list[Any]], what)
    try:
        return msgspec.convert(fields, dict(enumerate(_KINDS))[number])
    except (msgspec.ValidationError, KeyError) as error:
        raise PeerError(f"{what} cannot be read ({type(error).__name__}: {error})") from error
