"""Messages of the CUDA IPC transport, in the order in which ranks send them.

Tokens of memory and handles of events are sent only once, with the first message that refers to
them: neither memory nor an event is announced again before the peer has answered.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from asyncddp.serialization import unpack

NO_MEMORY = -1
"""Memory id of an empty tensor."""
ALL_MEMORY = -1
"""Memory id for all memory of a peer, which a leaving rank has closed."""


class _IPCMessageBase(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of the CUDA IPC transport's messages, encoded as arrays of their fields."""


class ReadyMessage(_IPCMessageBase, frozen=True, tag=0):
    """Ready message: the receiver can read a tensor in the sender's GPU memory."""

    tag: int  # of the transfer
    event_pair: int  # the sender's number of the pair
    memory_id: int  # the sender's number of the memory
    size: int  # in bytes
    last: bool  # whether these are the last bytes of the tensor
    ready: bytes = b""  # handle of the event after which it can be read; empty once known
    token: bytes = b""  # by which the memory is imported; empty once known, or without one


class DoneMessage(_IPCMessageBase, frozen=True, tag=1):
    """Done message: the receiver has enqueued all reads of the sender's GPU memory."""

    event_pair: int  # its number in the ready message
    read: bytes = b""  # handle of the event after which the memory was read; empty once known


class CloseMemoryMessage(_IPCMessageBase, frozen=True, tag=2):
    """Message by which a buffer's owner asks a peer to close its mapping of the memory."""

    memory_id: int


class MemoryClosedMessage(_IPCMessageBase, frozen=True, tag=3):
    """Reply message: the peer has closed its mapping of the memory."""

    memory_id: int


IPCMessage: TypeAlias = ReadyMessage | DoneMessage | CloseMemoryMessage | MemoryClosedMessage


def decode_message(data: bytes, peer: int) -> IPCMessage:
    """Decode a peer's CUDA IPC message; raise a PeerError if it is malformed.

    Example:
        >>> from asyncddp.serialization import pack
        >>> decode_message(pack(DoneMessage(3, b"handle")), peer=1)
        DoneMessage(event_pair=3, read=b'handle')
    """
    kind: Any = IPCMessage  # a union, which mypy does not take for a type
    message: IPCMessage = unpack(data, kind, f"what rank {peer} says of its memory")
    return message
