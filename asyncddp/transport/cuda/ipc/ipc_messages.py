"""Messages of the CUDA IPC transport: “ready to be read”, and “all reads are queued”."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import torch
from typing_extensions import Self

from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import from_bytes

_LENGTH_BYTES = 4  # of the length prefix


class _IPCMessageBase(msgspec.Struct, array_like=True):
    """Base class of the CUDA IPC transport's messages, encoded as tensors of fixed size."""

    nbytes: ClassVar[int]
    """Size of the encoded message."""

    @classmethod
    def allocate_buffer(cls) -> torch.Tensor:
        """Allocate a buffer for an encoded message."""
        return empty((cls.nbytes,), torch.uint8)

    def encode(self) -> torch.Tensor:
        """Encode the message as a tensor; a RuntimeError if it is too long.

        Example:
            >>> DoneMessage.decode(DoneMessage(3, b"handle").encode(), peer=1)
            DoneMessage(event_pair=3, read_event=b'handle')
        """
        data = pack(self)
        data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        if len(data) > self.nbytes:
            raise RuntimeError(
                f"expected handles of this device's memory and events that fit in {self.nbytes} "
                f"bytes, got {len(data)} bytes; leave cuda_ipc out of ASYNCDDP_DEVICE_WIRES"
            )
        return from_bytes(data.ljust(self.nbytes, b"\0"), torch.uint8, (self.nbytes,))

    @classmethod
    def decode(cls, buffer: torch.Tensor, peer: int) -> Self:
        """Decode a peer's message from a buffer; a PeerError if the bytes are none."""
        data = buffer.numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        return unpack(data[_LENGTH_BYTES:end], cls, f"what rank {peer} says of its memory")


class ReadyMessage(_IPCMessageBase):
    """Ready message: tells the receiver where it can read a tensor in the sender's GPU memory."""

    nbytes = 4096
    event_pair: int  # its number, between these two ranks in this direction
    ready: bytes  # handle of the event after which the memory can be read
    memory_id: int  # the sender's number of the memory; -1 for an empty tensor
    token: bytes  # by which the receiver imports the memory; empty if it cannot be exported
    size: int  # in bytes
    last: bool  # whether these are the last bytes of the tensor


MAX_TOKEN_BYTES = ReadyMessage.nbytes - 512
"""Most bytes of a token in a ready message; expandable segments of gigabytes have longer ones."""
ALL_MEMORY = -1
"""In place of an id where a rank has closed all memory of a peer, since it leaves."""


class DoneMessage(_IPCMessageBase):
    """Done message: the receiver has queued all work that reads the sender's GPU memory."""

    nbytes = 512
    event_pair: int  # its number in the ready message
    read_event: bytes  # handle of the event after which the memory was read
