"""Setup of DecentralizedDataParallel: label, communicator, consistency check, broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.ops.broadcast import broadcast_nonblocking_
from asyncddp.ops.consistency import require_equal_on_all_ranks
from asyncddp.parallel.asynchronous_communicator import AsynchronousBucketCommunicator
from asyncddp.parallel.bucket_communicator import BucketCommunicator, NoOpBucketCommunicator
from asyncddp.parallel.optimizer_buckets import NamedParameters
from asyncddp.parallel.synchronous_communicator import SynchronousBucketCommunicator
from topology import GraphOrSchedule

_WHO = "DecentralizedDataParallel"


def next_label(context: Context) -> str:
    """Return a label for the next wrapper, equal on all ranks that create them in one order."""
    number = context.extensions[_WHO] = context.extensions.get(_WHO, -1) + 1
    return f"{_WHO}{number}"


def make_communicator(
    context: Context, label: str, topology: GraphOrSchedule | None, *, sync: bool
) -> BucketCommunicator:
    """Create the communicator for a world size and mode.

    Raises:
        TopologyError: The topology does not fit.
    """
    if context.size == 1:
        return NoOpBucketCommunicator(context, label, topology)
    return (SynchronousBucketCommunicator if sync else AsynchronousBucketCommunicator)(
        context, label, topology
    )


def require_equal_model(context: Context, settings: Sequence[str], named: NamedParameters) -> None:
    """Check that settings and parameters are equal on all ranks; collective.

    Raises:
        MismatchError: On every rank, if any two differ.
    """
    facts = [
        f"parameter {name} of shape {tuple(one.shape)}, strides {one.stride()}, {one.dtype}"
        for name, one in named
    ]
    require_equal_on_all_ranks(
        context, f"{_WHO} needs the same model and settings on all ranks", [*settings, *facts]
    )


def broadcast_tensors(context: Context, tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors of all ranks with those of rank 0; collective."""
    if context.size > 1:
        with use(context):
            handles = [broadcast_nonblocking_(tensor.detach(), 0) for tensor in tensors]
        for handle in handles:
            handle.wait()
