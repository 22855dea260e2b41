"""``allreduce`` and ``local_allreduce``: the sum or average over all ranks, or a machine's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context import Context, current
from asyncddp.engine import Desk, Program, Steps
from asyncddp.memory.streams import empty_on, order_of, streams_of
from asyncddp.ops.door import averaging_dtype, carried, check_tensor, deliver, form_of
from asyncddp.ops.forms import in_place, nonblocking, verb
from asyncddp.ops.mixing import fits
from asyncddp.transport import Transport

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "local_allreduce",
    "local_allreduce_",
    "local_allreduce_nonblocking",
    "local_allreduce_nonblocking_",
]


@verb
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    *,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> Program[torch.Tensor]:
    r"""Sum or average a tensor over all ranks.

    .. math:: y = \sum_j x_j \quad\text{or}\quad y = \frac{1}{n} \sum_j x_j

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks. Halves are summed in float32.
        average: Divide by the number of ranks. Integers are summed only with ``average=False``, or
            averaged where ``round_integers`` asks for it; the sum of bools is their logical or.
        name: For messages; all ranks must give the same.
        round_integers: Average integers in float64 and round half to even.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y`, the same on all ranks: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The average of integers or bools, which was not asked for.
        DtypeError: The dtype cannot travel.
        MismatchError: Another rank calls another verb, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.allreduce(torch.tensor([bf.rank()]), average=False).item())
        [3, 3, 3]
    """
    return _program("allreduce", tensor, average, name, round_integers, check, out)


@verb
def local_allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    *,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> Program[torch.Tensor]:
    """Do what :func:`allreduce` does among the ranks of this machine, with the same arguments."""
    return _program("local_allreduce", tensor, average, name, round_integers, check, out)


allreduce_nonblocking = nonblocking(allreduce)
allreduce_ = in_place(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
local_allreduce_nonblocking = nonblocking(local_allreduce)
local_allreduce_ = in_place(local_allreduce)
local_allreduce_nonblocking_ = nonblocking(local_allreduce_)


def _program(
    name: str,
    tensor: torch.Tensor,
    average: bool,
    label: str | None,
    round_integers: bool,
    check: bool,
    out: torch.Tensor | None,
) -> Program[torch.Tensor]:
    context = current()
    row = check_tensor(name, tensor)
    dtype = row.accumulate
    if average:
        dtype = averaging_dtype(name, row, round_integers=round_integers)
    local = name.startswith("local")
    group, wire = members(context, local=local)
    title = f"{name}({'average' if average else 'sum'})" + (f" {label!r}" if label else "")

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Sum, and deliver."""
        divisor = len(group) if average else None
        total = yield from sum_over(desk, group, wire, tensor, dtype, title, divisor, out)
        return deliver(total, tensor, out)

    return Program(
        name, steps, label, ordered=True, local=local, check=check, order=order_of(tensor, out)
    )


def members(context: Context, *, local: bool) -> tuple[Sequence[int], Transport]:
    """The ranks of the machine or of the world, and their wire."""
    if local:
        return context.local_ranks, context.local_transport
    return range(context.size), context.transport


def sum_over(
    desk: Desk,
    group: Sequence[int],
    wire: Transport,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    title: str,
    divisor: int | None = None,
    out: torch.Tensor | None = None,
) -> Steps[torch.Tensor]:
    """Sum a tensor over a group, in ``dtype``, and divide it; into ``out`` where that fits."""
    own, wire = carried(wire, tensor)
    own = own.to(dtype)
    if out is not None and fits(out, own):
        into = out.detach()
    else:
        into = empty_on(streams_of(tensor), own.shape, dtype)
    form = form_of(title, tensor)
    yield from desk.collective(group, form, lambda: wire.iallreduce(own, into, divisor))
    return out if out is not None and into.data_ptr() == out.data_ptr() else into
