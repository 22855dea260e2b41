"""BlueFog's communication operations among all ranks, such as ``allreduce`` and ``broadcast``."""

from __future__ import annotations

from typing import Any

import torch

from asyncddp.context import current
from asyncddp.engine import Handle
from asyncddp.integrations.bluefog.error_translation import IntegerAverageError
from asyncddp.integrations.bluefog.verb_variants import (
    Options,
    blocking,
    in_place,
    nonblocking,
    unless_suspended,
)
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


def _run_allreduce(tensor: torch.Tensor, *, local: bool, **options: Any) -> torch.Tensor:
    run = _allreduce.local_allreduce if local else _allreduce.allreduce
    return run(tensor, **options)


def _start_allreduce(tensor: torch.Tensor, *, local: bool, **options: Any) -> Handle[torch.Tensor]:
    start = _allreduce.local_allreduce_nonblocking if local else _allreduce.allreduce_nonblocking
    return start(tensor, **options)


def _can_average(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@blocking(_run_allreduce, _start_allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> Options:
    """Average or sum a tensor over all ranks; see :func:`asyncddp.allreduce`.

    With ``is_hierarchical_local`` among the ranks of this machine alone.

    Raises:
        IntegerAverageError: The average of integers.
    """
    if average and isinstance(tensor, torch.Tensor) and not _can_average(tensor.dtype):
        raise IntegerAverageError(
            f"allreduce: argument average: expected False for {tensor.dtype}, whose average is "
            "none; or cast the tensor to float first"
        )
    local = is_hierarchical_local
    return {"tensor": tensor, "average": average, "local": local, "name": name}


@blocking(_broadcast.broadcast, _broadcast.broadcast_nonblocking)
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Options:
    """Give all ranks the root's tensor, as a new one; see :func:`asyncddp.broadcast`."""
    return {"tensor": tensor, "root_rank": root_rank, "name": name}


@blocking(_allgather.allgather, _allgather.allgather_nonblocking)
def allgather(tensor: torch.Tensor, name: str | None = None) -> Options:
    """Concatenate all ranks' tensors along the first dimension; see :func:`asyncddp.allgather`."""
    return {"tensor": tensor, "name": name}


allreduce_ = in_place(allreduce)
allreduce_nonblocking = nonblocking(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
broadcast_ = in_place(broadcast)
broadcast_nonblocking = nonblocking(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)
allgather_nonblocking = nonblocking(allgather)


@unless_suspended
def barrier() -> None:
    """Wait until all ranks are here; verbs under way stay under way.

    What was noted in a timeline before is in its file afterwards.
    """
    _barrier.barrier()
    tracer = current().tracer
    if tracer is not None:
        tracer.flush()
