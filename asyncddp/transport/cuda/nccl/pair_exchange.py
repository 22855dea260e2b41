"""Functions that open two ranks' NCCL communicator and launch grouped sends and receives on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.tensors.allocation import zeros
from asyncddp.transport.cuda.nccl.communicator import BYTE, NCCLCall, NCCLCommunicator
from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings
from asyncddp.transport.cuda.nccl.nccl_collectives import nccl_group


def exchange(nccl: Any, pair_rank: int, parts: Sequence[tuple[bool, torch.Tensor]]) -> NCCLCall:
    """Make the NCCL call of one group of messages between two ranks.

    The n-th send of either side meets the n-th receive of the other one.

    Args:
        nccl: cupy's module ``cupy.cuda.nccl``.
        pair_rank: This rank's number in the communicator, 0 or 1.
        parts: For each message whether it is a send, and its bytes on the device.
    """

    def call(handle: Any, stream: int) -> None:
        """Launch all of them."""
        with nccl_group(nccl):
            for sends, flat in parts:
                one = handle.send if sends else handle.recv
                one(flat.data_ptr(), flat.numel(), BYTE, 1 - pair_rank, stream)

    return call


def open_connected_pair(
    library: CupyBindings, streams: DeviceStreams, unique_id: bytes, pair_rank: int
) -> NCCLCommunicator:
    """Open a communicator of two ranks, and exchange a byte each way; waits for the other rank.

    NCCL connects two ranks in their first exchange, for which it waits as it does in opening.

    Args:
        library: The bindings of cupy.
        streams: Streams of the device.
        unique_id: The unique id, which the leader has created.
        pair_rank: This rank's number, 0 or 1.

    Raises:
        RuntimeError: NCCL refuses; cupy's message says why.
        PeerError: NCCL refuses the exchange.
    """
    made = NCCLCommunicator.open(library, streams, 2, unique_id, pair_rank)
    with streams.stream_context(StreamRole.COMPUTE):
        both = zeros((2,), torch.uint8, streams.device)
    first = exchange(library.nccl, pair_rank, [(True, both[:1]), (False, both[1:])])
    made.enter("the first exchange", first, [both], [streams.record_event(StreamRole.COMPUTE)])
    return made
