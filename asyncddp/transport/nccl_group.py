"""What two ranks enter together: one group of sends and receives of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.memory.allocate import zeros
from asyncddp.memory.streams import DeviceStreams, Queue
from asyncddp.transport.nccl_collectives import grouped
from asyncddp.transport.nccl_communicator import BYTE, Call, Communicator
from asyncddp.transport.nccl_library import Library

__all__ = ["connected", "exchange"]


def exchange(nccl: Any, place: int, parts: Sequence[tuple[bool, torch.Tensor]]) -> Call:
    """One group of messages of a communicator of two.

    The n-th send of either side meets the n-th receive of the other one.

    Args:
        nccl: cupy's module of NCCL.
        place: This rank's number in the communicator, 0 or 1.
        parts: For each message whether it is a send, and its bytes on the device.
    """

    def call(handle: Any, stream: int) -> None:
        """Enter all of them."""
        with grouped(nccl):
            for sends, flat in parts:
                one = handle.send if sends else handle.recv
                one(flat.data_ptr(), flat.numel(), BYTE, 1 - place, stream)

    return call


def connected(
    library: Library, streams: DeviceStreams, identity: bytes, place: int
) -> Communicator:
    """Open a communicator of two, and exchange a byte each way; waits for the other one.

    NCCL connects two ranks in their first exchange, for which it waits as it does in opening.

    Args:
        library: cupy.
        streams: Of the device.
        identity: What the leader has made.
        place: This rank's number, 0 or 1.

    Raises:
        RuntimeError: NCCL refuses; cupy's message says why.
        PeerError: It refuses the exchange.
    """
    made = Communicator.open(library, streams, 2, identity, place)
    with streams.working(Queue.WORK):
        both = zeros((2,), torch.uint8, streams.device)
    first = exchange(library.nccl, place, [(True, both[:1]), (False, both[1:])])
    made.enter("the first exchange", first, [both], [streams.mark(Queue.WORK)])
    return made
