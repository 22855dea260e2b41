"""What ranks tell each other, as MessagePack: typed when it is read, and never executed."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from asyncddp.errors import PeerError

__all__ = ["pack", "unpack"]

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """Numbers, strings, bytes, None, and tuples, lists, mappings and records of them, as bytes."""
    return msgspec.msgpack.encode(value)


def unpack(data: bytes | bytearray | memoryview, kind: type[T], what: str) -> T:
    """Read what :func:`pack` has written.

    Args:
        data: The bytes.
        kind: The type to which it must belong: a class, or such as ``list[int]``.
        what: What it is and whose, for the message.

    Raises:
        PeerError: It is nothing of that kind.

    Example:
        >>> unpack(pack((1, "a")), tuple[int, str], "an example")
        (1, 'a')
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(
            f"{what} cannot be read ({error}); run the same version of asyncddp on all ranks"
        ) from error
