"""What both sides of ``cuda_ipc`` tell each other: notes to readers, answers to lenders."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from asyncddp.memory.allocate import empty, values
from asyncddp.memory.packing import pack, unpack

__all__ = ["ANSWER", "MOST_WORDS", "NOTE", "Answer", "Note", "blank", "read", "written"]

NOTE = 4096
"""Bytes of a note."""
ANSWER = 512
"""Bytes of an answer."""
_LENGTH = 4  # bytes that say how many follow
MOST_WORDS = 100
"""Serial numbers in one note at most, so that there is room for the handles."""


M = TypeVar("M", bound="Note | Answer")


class Note(NamedTuple):
    """Something can be read.

    Attributes:
        slot: Number of the pair of events, between these two ranks in this direction.
        ready: Handle of the event after which it can be read.
        serial: Number of the memory, of those that the sender has shown; -1 for nothing.
        token: Where the memory is.
        offset: Where in it the bytes begin.
        size: How many there are.
        last: Whether the tensor ends with them.
        retired: Memory that will not be shown again, to be let go.
    """

    slot: int
    ready: bytes
    serial: int
    token: bytes
    offset: int
    size: int
    last: bool
    retired: tuple[int, ...]


class Answer(NamedTuple):
    """What reads it is queued.

    Attributes:
        slot: As in the note.
        taken: Handle of the event after which it has been read.
    """

    slot: int
    taken: bytes


def blank(size: int) -> torch.Tensor:
    """Paper for a message of so many bytes."""
    return empty((size,), torch.uint8)


def written(message: Note | Answer) -> torch.Tensor:
    """A message on its paper.

    Raises:
        RuntimeError: It is too long.

    Example:
        >>> read(written(Answer(3, b"handle")), Answer, peer=1)
        Answer(slot=3, taken=b'handle')
    """
    size = NOTE if isinstance(message, Note) else ANSWER
    data = pack(message)
    data = len(data).to_bytes(_LENGTH, "big") + data
    if len(data) > size:
        raise RuntimeError(
            f"expected handles of this device's memory and events that fit in {size} bytes, got "
            f"{len(data)} bytes; leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
        )
    return values(list(data.ljust(size, b"\0")), torch.uint8)


def read(paper: torch.Tensor, kind: type[M], peer: int) -> M:
    """A message from its paper.

    Args:
        paper: The paper.
        kind: What it must be.
        peer: Who has written it.

    Raises:
        PeerError: It is none.
    """
    data = paper.numpy().tobytes()
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
    return unpack(data[_LENGTH:end], kind, f"what rank {peer} says of its memory")
