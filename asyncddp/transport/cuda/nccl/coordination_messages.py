"""Messages by which two ranks agree on the order in which both launch NCCL sends and receives.

The rank of lower number is the *leader*: it creates the communicator's unique id and decides the
order. The other one is the *follower*: it announces its requests, each by its descriptor, and
launches what it is told, in that order.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, get_args

import msgspec

from asyncddp.errors import PeerError
from asyncddp.serialization import pack, unpack
from asyncddp.transport.cuda.nccl.match_table import RequestDescriptor


class OpenCommunicatorMessage(NamedTuple):
    """Request of the higher of two ranks to open an NCCL communicator, if its limit allows."""

    has_budget: bool


class UniqueIdMessage(NamedTuple):
    """NCCL unique id of the leader (lower rank), with which both ranks open a communicator."""

    unique_id: bytes


class OpenRefusedMessage(NamedTuple):
    """Leader's (lower rank's) refusal of a communicator: messages go through host memory."""


class GroupLaunchMessage(NamedTuple):
    """Message of the lower of two ranks: which requests both launch now as one NCCL group."""

    numbers: tuple[int, ...]


class SizeMismatchMessage(NamedTuple):
    """Notice of the leader (lower rank) that the sizes of a send and its receive differ."""

    number: int
    size: int


class CancelMessage(NamedTuple):
    """Request of the follower (higher rank) to the leader to cancel a receive not yet launched."""

    number: int


class CancelConfirmedMessage(NamedTuple):
    """Confirmation by the leader (lower rank) that a receive was cancelled before its launch."""

    number: int


class CommunicatorFailedMessage(NamedTuple):
    """Notice by either of two ranks that their NCCL communicator is broken, with the reason."""

    why: str


CoordinationMessage: TypeAlias = (
    OpenCommunicatorMessage
    | UniqueIdMessage
    | OpenRefusedMessage
    | RequestDescriptor
    | GroupLaunchMessage
    | SizeMismatchMessage
    | CancelMessage
    | CancelConfirmedMessage
    | CommunicatorFailedMessage
)

_KINDS: tuple[type[CoordinationMessage], ...] = get_args(CoordinationMessage)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def encode_message(message: CoordinationMessage) -> bytes:
    """Encode a coordination message.

    Example:
        >>> decode_message(encode_message(GroupLaunchMessage((3, 1))), peer=0)
        GroupLaunchMessage(numbers=(3, 1))
    """
    return pack((_NUMBERS[type(message)], message))


def decode_message(data: bytes, peer: int) -> CoordinationMessage:
    """Decode a coordination message.

    Raises:
        PeerError: The bytes are no such message.
    """
    what = f"what rank {peer} says of its messages by NCCL"
    number, fields = unpack(data, tuple[int, list[Any]], what)
    try:
        return msgspec.convert(fields, dict(enumerate(_KINDS))[number])
    except (msgspec.ValidationError, KeyError) as error:
        raise PeerError(f"{what} cannot be read ({type(error).__name__}: {error})") from error
