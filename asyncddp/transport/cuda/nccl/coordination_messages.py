"""Messages by which two ranks agree on a common launch order of NCCL sends and receives.

The lower rank is the *leader*: it creates the communicator's unique id and decides the order. The
higher rank is the *follower*: it announces its requests, each by its descriptor, and launches them
in the leader's order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from asyncddp.serialization import unpack


class _CoordinationMessageBase(msgspec.Struct, array_like=True, tag=True):
    """Base class of the messages by which two ranks coordinate their NCCL calls."""


class OpenCommunicatorMessage(_CoordinationMessageBase):
    """Request of the higher rank (follower) to open an NCCL communicator for both ranks."""

    has_budget: bool


class UniqueIdMessage(_CoordinationMessageBase):
    """Reply of the lower rank (leader) with the NCCL unique id for opening a communicator."""

    unique_id: bytes


class OpenRefusedMessage(_CoordinationMessageBase):
    """Reply of the lower rank (leader) that refuses NCCL: both then stage through host memory."""


class TransferPostedMessage(_CoordinationMessageBase):
    """Announcement of a posted send or receive to the peer, numbered per rank."""

    number: int
    sends: bool
    tag: int
    size: int


class GroupLaunchMessage(_CoordinationMessageBase):
    """Command of the lower rank (leader): both launch these requests now as one NCCL group."""

    numbers: tuple[int, ...]


class SizeMismatchMessage(_CoordinationMessageBase):
    """Notice of the lower rank (leader) that a matched send and receive differ in size."""

    number: int
    size: int


class CancelMessage(_CoordinationMessageBase):
    """Notice of the higher rank (follower) that it has cancelled a receive."""

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
