"""Messages of the CUDA IPC transport: memory is ready to read, and all reads of it are queued."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import empty, make_tensor

READY_BYTES = 4096
"""Size of an encoded ready message in bytes."""
DONE_BYTES = 512
"""Size of an encoded done message in bytes."""
_LENGTH_BYTES = 4  # of the length prefix
MAX_RETIRED_IDS = 100
"""Most ids of discarded memory in one ready message, so that the handles fit."""


M = TypeVar("M", bound="ReadyMessage | DoneMessage")


class ReadyMessage(NamedTuple):
    """Ready message: tells the receiver where it can read a tensor in the sender's GPU memory.

    Attributes:
        event_pair: Number of the event pair, between these two ranks in this direction.
        ready: Handle of the event after which the memory can be read.
        memory_id: The sender's number of the memory; -1 for an empty tensor.
        token: Export token of the memory.
        offset: Offset of the bytes in it.
        size: Number of bytes.
        last: Whether these are the last bytes of the tensor.
        retired: Ids of discarded memory, to be closed.
    """

    event_pair: int
    ready: bytes
    memory_id: int
    token: bytes
    offset: int
    size: int
    last: bool
    retired: tuple[int, ...]


class DoneMessage(NamedTuple):
    """Done message: the receiver has queued all work that reads the sender's GPU memory.

    It has the event pair's number, and the handle of the event after which the memory was read.
    """

    event_pair: int
    read_event: bytes


def allocate_message_buffer(size: int) -> torch.Tensor:
    """Allocate a buffer for an encoded message of ``size`` bytes."""
    return empty((size,), torch.uint8)


def encode_message(message: ReadyMessage | DoneMessage) -> torch.Tensor:
    """Encode a message as a tensor of fixed size.

    Raises:
        RuntimeError: The message is too long.

    Example:
        >>> decode_message(encode_message(DoneMessage(3, b"handle")), DoneMessage, peer=1)
        DoneMessage(event_pair=3, read_event=b'handle')
    """
    size = READY_BYTES if isinstance(message, ReadyMessage) else DONE_BYTES
    data = pack(message)
    data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
    if len(data) > size:
        raise RuntimeError(
            f"expected handles of this device's memory and events that fit in {size} bytes, got "
            f"{len(data)} bytes; leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
        )
    return make_tensor(list(data.ljust(size, b"\0")), torch.uint8)


def decode_message(message_buffer: torch.Tensor, kind: type[M], peer: int) -> M:
    """Decode a peer's message from a tensor.

    Raises:
        PeerError: The bytes are no such message.
    """
    data = message_buffer.numpy().tobytes()
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    return unpack(data[_LENGTH_BYTES:end], kind, f"what rank {peer} says of its memory")
