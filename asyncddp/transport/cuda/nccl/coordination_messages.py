"""Messages by which two ranks agree on the order in which both launch NCCL sends and receives.

The rank of lower number is the *leader*: it creates the communicator's unique id and decides the
order. The other one is the *follower*: it announces its requests, each by its descriptor, and
launches what it is told, in that order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from asyncddp.serialization import unpack


class _CoordinationMessageBase(msgspec.Struct, array_like=True, tag=True):
    """Base class of the messages: encoded as the class's name and the values of its fields."""


class OpenCommunicatorMessage(_CoordinationMessageBase):
    """Request of the higher of two ranks to open an NCCL communicator for both."""

    has_budget: bool


class UniqueIdMessage(_CoordinationMessageBase):
    """Message of the lower rank with the NCCL unique id, by which both open a communicator."""

    unique_id: bytes


class OpenRefusedMessage(_CoordinationMessageBase):
    """Message of a pair's lower rank, which refuses NCCL: both then copy through host memory."""


class TransferPostedMessage(_CoordinationMessageBase):
    """Message to the other rank of a pair: the pair's n-th send or receive has been posted here."""

    number: int
    sends: bool
    tag: int
    size: int


class GroupLaunchMessage(_CoordinationMessageBase):
    """Message of the lower of two ranks: which requests both launch now as one NCCL group."""

    numbers: tuple[int, ...]


class SizeMismatchMessage(_CoordinationMessageBase):
    """Message from the lower rank of a pair to the other: sizes of send and receive differ."""

    number: int
    size: int


class CancelMessage(_CoordinationMessageBase):
    """Notice of the follower (higher rank) that it has given up a receive."""

    descriptor: TransferPostedMessage


class CommunicatorFailedMessage(_CoordinationMessageBase):
    """Notice by either of two ranks that their NCCL communicator is broken, with the reason."""

    why: str


CoordinationMessage: TypeAlias = (
    OpenCommunicatorMessage
    | UniqueIdMessage
    | OpenRefusedMessage
    | TransferPostedMessage
    | GroupLaunchMessage
    | SizeMismatchMessage
    | CancelMessage
    | CommunicatorFailedMessage
)


def decode_message(data: bytes, peer: int) -> CoordinationMessage:
    """Decode a peer's coordination message; a PeerError if the bytes are none.

    Example:
        >>> from asyncddp.serialization import pack
        >>> decode_message(pack(GroupLaunchMessage((3, 1))), peer=0)
        GroupLaunchMessage(numbers=(3, 1))
    """
    kind: Any = CoordinationMessage  # a union, which mypy does not take for a type
    message: CoordinationMessage = unpack(
        data, kind, f"what rank {peer} says of its messages by NCCL"
    )
    return message
