"""BlueFog's communication operations among all ranks, such as ``allreduce`` and ``broadcast``."""

from __future__ import annotations

from functools import partial

import torch

from asyncddp.context import current
from asyncddp.integrations.bluefog.bluefog_state import active_state
from asyncddp.integrations.bluefog.error_translation import IntegerAverageError, translate_errors
from asyncddp.integrations.bluefog.verb_variants import VerbCall, blocking, full_name, nonblocking
from asyncddp.ops import allgather as _allgather
from asyncddp.ops import allreduce as _allreduce
from asyncddp.ops import barrier as _barrier
from asyncddp.ops import broadcast as _broadcast

__all__ = [
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_nonblocking",
    "broadcast_nonblocking_",
]


def _sum(
    tensor: torch.Tensor, average: bool, local: bool, name: str | None, *, in_place: bool
) -> VerbCall:
    if average and isinstance(tensor, torch.Tensor) and not _averages(tensor.dtype):
        raise IntegerAverageError(
            f"allreduce: argument average: expected False for {tensor.dtype}, whose average is "
            "none; or cast the tensor to float first"
        )
    forms = {
        (False, False): (_allreduce.allreduce, _allreduce.allreduce_nonblocking),
        (False, True): (_allreduce.allreduce_, _allreduce.allreduce_nonblocking_),
        (True, False): (_allreduce.local_allreduce, _allreduce.local_allreduce_nonblocking),
        (True, True): (_allreduce.local_allreduce_, _allreduce.local_allreduce_nonblocking_),
    }
    run, start = forms[local, in_place]
    options = {"average": average, "name": full_name("allreduce", name)}
    return VerbCall(partial(run, tensor), partial(start, tensor), options)


def _averages(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@blocking
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> VerbCall:
    """Average or sum a tensor over all ranks, or over those of this machine.

    Args:
        tensor: Equal in shape and dtype on all ranks.
        average: Divide by the number of ranks.
        is_hierarchical_local: Among the ranks of this machine alone.
        name: For messages; all ranks must give the same.

    Returns:
        A new tensor.

    Raises:
        IntegerAverageError: The average of integers.
    """
    return _sum(tensor, average, is_hierarchical_local, name, in_place=False)


@blocking
def allreduce_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> VerbCall:
    """:func:`allreduce` whose result replaces the tensor, which is returned."""
    return _sum(tensor, average, is_hierarchical_local, name, in_place=True)


@blocking
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> VerbCall:
    """Give all ranks the root's tensor, as a new one.

    Args:
        tensor: Equal in shape and dtype on all ranks.
        root_rank: The root, the same on all ranks.
        name: For messages; all ranks must give the same.
    """
    options = {"tensor": tensor, "root_rank": root_rank, "name": full_name("broadcast", name)}
    return VerbCall(_broadcast.broadcast, _broadcast.broadcast_nonblocking, options)


@blocking
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> VerbCall:
    """:func:`broadcast` whose result replaces the tensor, which is returned."""
    run = partial(_broadcast.broadcast_, tensor)
    start = partial(_broadcast.broadcast_nonblocking_, tensor)
    return VerbCall(run, start, {"root_rank": root_rank, "name": full_name("broadcast", name)})


@blocking
def allgather(tensor: torch.Tensor, name: str | None = None) -> VerbCall:
    """Concatenate all ranks' tensors along the first dimension, which may differ.

    Args:
        tensor: With at least one dimension.
        name: For messages; all ranks must give the same.
    """
    options = {"tensor": tensor, "name": full_name("allgather", name)}
    return VerbCall(_allgather.allgather, _allgather.allgather_nonblocking, options)


allreduce_nonblocking = nonblocking(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
broadcast_nonblocking = nonblocking(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)
allgather_nonblocking = nonblocking(allgather)


@translate_errors()
def barrier() -> None:
    """Wait until all ranks are here; verbs under way stay under way.

    What was noted in a timeline before is in its file afterwards.
    """
    active_state()
    _barrier.barrier()
    tracer = current().tracer
    if tracer is not None:
        tracer.flush()
