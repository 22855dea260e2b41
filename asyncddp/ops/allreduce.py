"""``allreduce`` and ``local_allreduce``: sum or average over all ranks, or those of a machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context import current
from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import stream_ordering_of, streams_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE
from asyncddp.ops.encoded_exchange import (
    Compression,
    bound_to,
    checked_compression,
    sum_encoded_over_group,
)
from asyncddp.ops.validation import (
    accumulation_dtype,
    can_write_result,
    prepare_for_transport,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import blocking, in_place, nonblocking
from asyncddp.transport import Transport


@blocking
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    *,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Sum or average a tensor over all ranks.

    .. math:: y = \sum_j x_j \quad\text{or}\quad y = \frac{1}{n} \sum_j x_j

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks. Halves are summed in float32.
        average: Divide by the number of ranks. Integers are summed only with ``average=False``, or
            averaged where ``round_integers`` asks for it; the sum of bools is their logical or.
        name: For messages; all ranks must give the same.
        round_integers: Average integers in float64 and round half to even.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        compression: Compressor, or its name, by which floats travel: each rank averages one of n
            parts of what all have encoded, and sends it encoded to all. All ranks get equal bits.
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
    return _program("allreduce", tensor, average, name, round_integers, check, compression, out)


@blocking
def local_allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    *,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    """Do what :func:`allreduce` does among the ranks of this machine, with the same arguments."""
    return _program(
        "local_allreduce", tensor, average, name, round_integers, check, compression, out
    )


allreduce_nonblocking = nonblocking(allreduce)
allreduce_ = in_place(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
local_allreduce_nonblocking = nonblocking(local_allreduce)
local_allreduce_ = in_place(local_allreduce)
local_allreduce_nonblocking_ = nonblocking(local_allreduce_)


def _program(
    verb: str,
    tensor: torch.Tensor,
    average: bool,
    name: str | None,
    round_integers: bool,
    check: bool,
    compression: Compression,
    out: torch.Tensor | None,
) -> OperationSpec[torch.Tensor]:
    context, local = current(), verb == "local_allreduce"
    dtype = accumulation_dtype(verb, tensor, round_integers=round_integers, average=average)
    title = f"{verb}({'average' if average else 'sum'})" + (f" {name!r}" if name else "")
    group: Sequence[int] = context.local_ranks if local else range(context.size)
    transport = context.local_transport if local else context.transport

    compression = checked_compression(verb, tensor, compression)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        divisor = len(group) if average else None
        if compression is not None and len(group) > 1 and tensor.numel():
            codec = bound_to(op, compression)
            total = yield from sum_encoded_over_group(op, group, tensor, codec, title, divisor or 1)
            return write_result(total, tensor, out)
        total = yield from sum_over_group(op, group, transport, tensor, dtype, title, divisor, out)
        return write_result(total, tensor, out)

    order = stream_ordering_of(tensor, out)
    return OperationSpec(
        verb,
        steps,
        name,
        ordered=True,
        group=MACHINE_COLLECTIVE if local else COLLECTIVE,
        check=check,
        stream_ordering=order,
    )


def sum_over_group(
    op: OperationExchanges,
    group: Sequence[int],
    transport: Transport,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    title: str,
    divisor: int | None = None,
    out: torch.Tensor | None = None,
) -> Steps[torch.Tensor]:
    """Sum a tensor over a group in ``dtype``, and divide it; into ``out`` where possible."""
    own, transport = prepare_for_transport(transport, tensor)
    own = own.to(dtype)
    total = out if can_write_result(out, own) else empty_on(streams_of(tensor), own.shape, dtype)
    into = total.detach() if total is out else total
    form = signature_of(title, tensor)
    yield from op.collective(group, form, lambda: transport.iallreduce(own, into, divisor))
    return total
