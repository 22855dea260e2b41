"""Frames on the sockets between two ranks: a fixed header, and a payload that may be empty.

A tensor of more than ``EAGER_BYTES`` is announced by ``RTS`` (ready to send), ``CTS`` (clear to
send) says that its receiver is ready, and ``DATA`` frames carry it. To another machine the first
``CREDIT_BYTES`` follow the announcement unasked: a rendezvous would take three latencies.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

EAGER_BYTES = 1 << 16
"""Tensors up to this size are sent at once, into the receiver's memory for unexpected messages."""
CREDIT_BYTES = 1 << 22
"""Limit on bytes of larger tensors in flight to a rank that is not ready to receive them."""


class FrameKind(IntEnum):
    """Kind of frame on a socket: handshake, control message, tensor data, failure, ..."""

    HELLO = 0  # the first from each end: its rank as ``number``, a code; ``tag`` 1 of a replacement
    MESSAGE = 1  # control message of a group
    EAGER = 2  # a whole tensor
    RTS = 3  # announces a tensor of ``size`` bytes as ``number``; no payload
    CTS = 4  # asks for all of tensor ``number``
    DATA = 5  # the next bytes of tensor ``number``
    WITHDRAWN = 6  # tensor ``number`` will not be sent
    REFUSED = 7  # tensor ``number`` does not fit; the receive expected ``size`` bytes
    FAILED = 8  # rank ``number`` has failed; the payload says how
    BYE = 9  # the sender leaves in an orderly way
    JOIN = 10  # of a process that would be rank ``number``, or an answer to it


_NO_PAYLOAD = frozenset(
    {FrameKind.RTS, FrameKind.CTS, FrameKind.WITHDRAWN, FrameKind.REFUSED, FrameKind.BYE}
)


class FrameHeader(NamedTuple):
    """Header of a frame; ``group`` and ``tag`` address messages and tensors."""

    kind: FrameKind
    tag: int = 0
    group: int = 0
    number: int = 0
    size: int = 0

    @property
    def payload_bytes(self) -> int:
        """Number of bytes that follow the header."""
        return 0 if self.kind in _NO_PAYLOAD else self.size

    def pack(self) -> bytes:
        """Encode the header."""
        return _FORMAT.pack(*self)


_FORMAT = struct.Struct("<BxxxIQQQ")
HEADER_BYTES = _FORMAT.size


def unpack_header(data: bytearray | memoryview, offset: int) -> FrameHeader:
    """Decode a header; raise ValueError if the bytes are not a valid header."""
    kind, tag, group, number, size = _FORMAT.unpack_from(data, offset)
    return FrameHeader(FrameKind(kind), tag, group, number, size)
