"""``allgather``: every rank's tensor, one below the other, for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncddp.context import current
from asyncddp.engine import Desk, Program, Steps
from asyncddp.memory.allocate import empty, values
from asyncddp.memory.streams import empty_on, order_of, streams_of
from asyncddp.ops.door import carried, check_tensor, deliver, form_of
from asyncddp.ops.forms import nonblocking, verb
from asyncddp.transport import Transport

__all__ = ["allgather", "allgather_nonblocking", "gather_over"]


@verb
def allgather(
    tensor: torch.Tensor, *, name: str | None = None, check: bool = False
) -> Program[torch.Tensor]:
    r"""Concatenate all ranks' tensors along the first dimension, in the order of the ranks.

    .. math:: y = (x_0, x_1, \dots, x_{n-1})

    Args:
        tensor: :math:`x_i`, with at least one dimension; the first one may differ between ranks and
            may be 0.
        name: For messages; all ranks must give the same.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.

    Returns:
        :math:`y`, the same on all ranks.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A 0-dim tensor.
        DtypeError: The dtype cannot travel.
        MismatchError: Another rank has another dtype or other trailing dimensions.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.allgather(torch.full((bf.rank(),), bf.rank())).tolist())[0]
        [1, 2, 2]
    """
    context = current()
    check_tensor("allgather", tensor, min_ndim=1)
    title = "allgather" + (f" {name!r}" if name else "")

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Tell sizes, then gather."""
        group, wire = range(context.size), context.transport
        return (yield from gather_over(desk, group, wire, tensor, title))

    return Program("allgather", steps, name, ordered=True, check=check, order=order_of(tensor))


allgather_nonblocking = nonblocking(allgather)


def gather_over(
    desk: Desk, group: Sequence[int], wire: Transport, tensor: torch.Tensor, title: str
) -> Steps[torch.Tensor]:
    """Gather a tensor over a group, first the sizes, then the rows."""
    own, fitting = carried(wire, tensor)
    rows = empty((len(group),), torch.int64)
    mine = values([own.shape[0]], torch.int64)
    form = form_of(title, own, ragged=True)
    yield from desk.collective(group, form, lambda: wire.iallgather(mine, rows, [1] * len(group)))
    width = math.prod(own.shape[1:])
    counts = [int(count) * width for count in rows]
    whole = empty_on(streams_of(tensor), (sum(counts),), own.dtype)
    yield from desk.collective(group, form, lambda: fitting.iallgather(own, whole, counts))
    return deliver(whole.view(int(rows.sum()), *own.shape[1:]), tensor, None)
