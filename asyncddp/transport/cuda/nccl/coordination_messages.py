"""Messages by two ranks to agree on a common launch order of NCCL sends and receives.

The lower rank is the *leader*: it creates the communicator's unique id and decides the order. The
higher rank is the *follower*: it announces its requests, each by its descriptor, and launches them
in the leader's order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from asyncddp.serialization import unpack


class _CoordinationMessageBase(msgspec.Struct, array_like=True, tag=True):
    """Base class of coordination messages, encoded as the class name and the field values."""


class OpenCommunicatorMessage(_CoordinationMessageBase):
    """Request of the follower to open an NCCL communicator for both ranks."""

    has_budget: bool


class UniqueIdMessage(_CoordinationMessageBase):
    """Reply of the leader with the NCCL unique id that both ranks open a communicator with."""

    unique_id: bytes


class OpenRefusedMessage(_CoordinationMessageBase):
    """Reply of the leader that refuses NCCL: both ranks then stage through host memory."""


class TransferPostedMessage(_CoordinationMessageBase):
    """Descriptor of a posted send or receive, numbered per rank; announces it to the peer."""

    number: int
    sends: bool
    tag: int
    size: int


class GroupLaunchMessage(_CoordinationMessageBase):
    """Order of the leader: the requests that both ranks launch now as one NCCL group."""

    numbers: tuple[int, ...]


class SizeMismatchMessage(_CoordinationMessageBase):
    """Notice of the leader that the sizes of a matched send and receive differ."""

    number: int
    size: int


class CancelMessage(_CoordinationMessageBase):
    """Notice of the follower that it has cancelled a receive."""

    descriptor: TransferPostedMessage


class CommunicatorFailedMessage(_CoordinationMessageBase):
    """Notice of either rank that the NCCL communicator is broken, with the reason."""

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
    """Decode a peer's coordination message; raise a PeerError if it is malformed.

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
