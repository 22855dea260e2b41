"""Setup of DecentralizedDataParallel: chooses a communicator, and broadcasts the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.ops.broadcast import broadcast_nonblocking_
from asyncddp.parallel.bucket_communicator import BucketCommunicator, NoOpBucketCommunicator
from asyncddp.parallel.synchronous_communicator import SynchronousBucketCommunicator
from asyncddp.parallel.window_communicator import WindowBucketCommunicator
from topology import GraphOrSchedule


def make_communicator(
    context: Context, label: str, topology: GraphOrSchedule | None, *, sync: bool
) -> BucketCommunicator:
    """Create the communicator for a world size and mode.

    Raises:
        TopologyError: The topology does not fit.
    """
    if context.size == 1:
        return NoOpBucketCommunicator(context, label, topology)
    return (SynchronousBucketCommunicator if sync else WindowBucketCommunicator)(
        context, label, topology
    )


def broadcast_tensors(context: Context, tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors of all ranks with those of rank 0; collective."""
    if context.size > 1:
        with use(context):
            handles = [broadcast_nonblocking_(tensor.detach(), 0) for tensor in tensors]
        for handle in handles:
            handle.wait()
