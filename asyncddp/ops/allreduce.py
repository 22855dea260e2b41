"""``allreduce`` and ``local_allreduce``: reduce a tensor over all ranks, a group, or a machine."""

from __future__ import annotations

from functools import partial

import torch

from asyncddp.context import current
from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import (
    OperationExchanges,
    OperationSpec,
    StartedCollective,
    Steps,
    run_collective,
)
from asyncddp.errors import ArgumentError
from asyncddp.ops.encoded_exchange import (
    Compression,
    bound_to,
    checked_compression,
    sum_encoded_over_group,
)
from asyncddp.ops.group_exchange import reduce_over_group
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    members_of,
    ranks_of_machine,
)
from asyncddp.ops.reduce_op import ReduceOp, Reduction, reduction_of
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    can_write_result,
    direct_out,
    prepare_for_transport,
    signature_of,
    single_output,
    write_result,
)
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.tensors.means import split_divisor
from asyncddp.tensors.tensor_lists import TensorOrTensors
from asyncddp.transport import Transport


@of_tensors(ListKind.ELEMENTWISE, collective=True)
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    *,
    op: ReduceOp | str | None = None,
    group: ProcessGroup | None = None,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Reduce a tensor over all ranks or a group: average (the default), sum or another operator.

    .. math:: y = \sum_j x_j \quad\text{or}\quad y = \frac{1}{n} \sum_j x_j
        \quad\text{or}\quad y = \max_j x_j \quad\text{or}\ \dots

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks. Halves are summed in float32.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        average: Divide by the number of ranks, as is the default. Integers are summed only with
            ``average=False``, or averaged where ``round_integers`` asks for it; the sum of bools is
            their logical or.
        op: Reduction operator in place of ``average``: a :class:`~asyncddp.ReduceOp` or its name,
            ``"sum"``, ``"average"``, ``"product"``, ``"min"``, ``"max"``, or of integers and bools
            ``"and"``, ``"or"``, ``"xor"``.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        round_integers: Average integers in float64 and round half to even.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        compression: Compressor, or its name, for floats: each rank averages one of n parts of all
            ranks' encoded tensors, and sends the encoded average to all. All ranks get equal bits.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y`, the same on all ranks: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The average of integers or bools, which was not asked for; ``op`` contradicts
            ``average`` or the dtype; this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank calls another verb, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.allreduce(torch.tensor([bf.rank()]), average=False).item())
        [3, 3, 3]
    """
    out, members = single_output("allreduce", out), members_of("allreduce", group)
    compression = checked_compression("allreduce", tensor, compression, members.size)
    reduction = reduction_of("allreduce", tensor, op, average, round_integers=round_integers)
    return plan_allreduce("allreduce", members, tensor, reduction, name, check, compression, out)


@of_tensors(ListKind.ELEMENTWISE, collective=True)
def local_allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    *,
    op: ReduceOp | str | None = None,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    """Reduce over the ranks of this machine, with the arguments of :func:`allreduce`."""
    verb, group = "local_allreduce", ranks_of_machine(current())
    out = single_output(verb, out)
    compression = checked_compression(verb, tensor, compression, group.size)
    reduction = reduction_of(verb, tensor, op, average, round_integers=round_integers)
    return plan_allreduce(verb, group, tensor, reduction, name, check, compression, out)


allreduce_nonblocking = nonblocking(allreduce)
allreduce_ = in_place(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
local_allreduce_nonblocking = nonblocking(local_allreduce)
local_allreduce_ = in_place(local_allreduce)
local_allreduce_nonblocking_ = nonblocking(local_allreduce_)


def plan_allreduce(
    verb: str,
    group: ProcessGroup,
    tensor: torch.Tensor,
    reduction: Reduction,
    name: str | None = None,
    check: bool = False,
    compression: Compression = None,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    """Plan a reduction over a group; the arguments have been checked."""
    ranks, title = group.ranks, f"{verb}({reduction.name})" + (f" {name!r}" if name else "")
    if compression is not None and not reduction.is_sum:
        raise ArgumentError(
            f"{verb}: arguments op, compression: expected a sum or an average of what travels "
            f"encoded, got op={reduction.name!r}; leave compression= away"
        )

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor]:
        if compression is not None and len(ranks) > 1 and tensor.numel():
            codec, divisor = bound_to(op, compression), reduction.divisor(len(ranks)) or 1
            total = yield from sum_encoded_over_group(op, ranks, own, codec, title, divisor)
        else:
            total = yield from reduce_over_group(op, ranks, own, reduction, title)
        return write_result(total, tensor, out)

    form, ways = signature_of(title, tensor), CollectiveImplementations[torch.Tensor](overlaps=True)
    if compression is None:
        ways = ways_of_reduction(group, tensor, reduction)
    return group.collective(verb, form, (tensor, out), messages, ways, name, check)


def ways_of_reduction(
    group: ProcessGroup, tensor: torch.Tensor, reduction: Reduction
) -> CollectiveImplementations[torch.Tensor]:
    """Return the ways of reducing in shared-memory slots and, for sums, by the transport."""
    transport = group.transport
    divisor, summed_in = reduction.divisor(group.size), reduction.summed_in(tensor.dtype)

    def combine(terms: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor:
        into = direct_out(out, reduction.dtype, given.shape)
        return write_result(reduction.of(terms, into), given, out)

    def start(_: Tensors, given: torch.Tensor, out: Output) -> StartedCollective[torch.Tensor]:
        assert transport is not None
        started = _start_sum(transport, given, summed_in, divisor, out)
        return started.then(lambda total: write_result(total, given, out))

    sums = start if reduction.is_sum else None
    return CollectiveImplementations(combine, sums, dtype=reduction.dtype, overlaps=True)


def sum_over_group(
    op: OperationExchanges,
    group: ProcessGroup,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    title: str,
    divisor: int | None = None,
    out: torch.Tensor | None = None,
) -> Steps[torch.Tensor]:
    """Sum a tensor over a group in ``dtype``, and divide the sum; into ``out`` if possible."""
    if group.transport is not None:
        start = partial(_start_sum, group.transport, tensor, dtype, divisor, out)
        return (yield from run_collective(op, group.ranks, signature_of(title, tensor), start))
    own, _ = prepare_for_transport(group.context.transport, tensor)
    scale, rest = split_divisor(divisor)
    own = own.to(dtype) if scale == 1 else own.to(dtype) * scale
    summed = Reduction(ReduceOp.SUM, dtype)
    total = yield from reduce_over_group(op, group.ranks, own, summed, title)
    return total if rest == 1 else total.div_(rest)


def _start_sum(
    transport: Transport,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    divisor: int | None,
    out: torch.Tensor | None,
) -> StartedCollective[torch.Tensor]:
    own, transport = prepare_for_transport(transport, tensor)
    own = own.to(dtype)
    total = out if can_write_result(out, own) else empty_on(streams_of(tensor), own.shape, dtype)
    into = total.detach() if total is out else total
    return StartedCollective(transport.iallreduce(own, into, divisor), lambda: total)
