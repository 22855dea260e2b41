"""Serialization of messages between ranks as MessagePack, with type checks when decoding."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from asyncddp.errors import PeerError

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """Encode numbers, strings, bytes and None, and tuples, lists, mappings and records of these."""
    return msgspec.msgpack.encode(value)


def unpack(data: bytes | bytearray | memoryview, kind: type[T], what: str) -> T:
    """Decode bytes from :func:`pack`; ``what`` names value and sender in the PeerError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(
            f"{what} cannot be read ({error}); run the same version of asyncddp on all ranks"
        ) from error
