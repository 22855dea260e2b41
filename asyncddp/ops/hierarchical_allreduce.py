"""``hierarchical_allreduce``: sums within machines, then over one rank of each machine."""

from __future__ import annotations

import torch

from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.ops.allreduce import plan_allreduce, sum_over_group, ways_of_reduction
from asyncddp.ops.encoded_exchange import (
    Compression,
    bound_to,
    checked_compression,
    sum_encoded_over_group,
)
from asyncddp.ops.process_group import members_of, ranks_of_machine
from asyncddp.ops.reduce_op import ReduceOp, Reduction
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    accumulation_dtype,
    prepare_for_transport,
    signature_of,
    single_output,
    write_result,
)
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.tensors.means import first_divisor
from asyncddp.tensors.tensor_lists import TensorOrTensors

_VERB = "hierarchical_allreduce"
_SCATTER_AND_GATHER = 2  # exchanges among leaders


@of_tensors(ListKind.ELEMENTWISE, collective=True)
def hierarchical_allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    *,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Sum or average a tensor over all ranks; only one rank of each machine uses the network.

    .. math:: y = \frac1d \sum_m s_m, \qquad s_m = \sum_{i \in m} x_i, \qquad
              d = n \text{ or } 1

    The first rank of each machine m has the sum over its machine, takes part in the sum over
    machines, and gives the result to the others. Machines may have different numbers of ranks. For
    an average :math:`s_m` is divided by a power of two at once, so that it does not overflow.

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks. Halves are summed in float32.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        average: Divide by the number of ranks, as in :func:`allreduce`.
        name: For messages; all ranks must give the same.
        round_integers: Average integers in float64 and round half to even.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        compression: Compressor, or its name, of messages between machines; within machines tensors
            are summed uncompressed. The compressor of each machine's first rank is used.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y`, the same on all ranks: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The average of integers or bools, which was not asked for.
        DtypeError: The dtype cannot be sent, or cannot be compressed.
        MismatchError: Another rank calls another verb, dtype, shape or compression.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> def mean():
        ...     return bf.hierarchical_allreduce(torch.tensor([float(bf.rank())])).item()
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(mean)
        [1.5, 1.5, 1.5, 1.5]

    References:
        Gan et al., "Bagua: scaling up distributed learning with system relaxations", VLDB 2021.
    """
    members = members_of(_VERB, None)
    context = members.context
    leaders = [ranks[0] for ranks in context.machines.members]
    out = single_output(_VERB, out)
    compression = checked_compression(_VERB, tensor, compression, len(leaders))
    dtype = accumulation_dtype(_VERB, tensor, round_integers=round_integers, average=average)
    title = f"{_VERB}({'average' if average else 'sum'})" + (f" {name!r}" if name else "")

    reduction = Reduction(ReduceOp.AVERAGE if average else ReduceOp.SUM, dtype)
    if members.transport is None:  # of a later view, whose ranks exchange messages
        return plan_allreduce(_VERB, members, tensor, reduction, name, check, compression, out)
    machine = ranks_of_machine(context)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        divisor = context.size if average else None
        if len(leaders) == 1:
            total = yield from sum_over_group(op, machine, tensor, dtype, title, divisor, out)
            return write_result(total, tensor, out)
        first = first_divisor(max(map(len, context.machines.members))) if average else None
        total = yield from sum_over_group(op, machine, tensor, dtype, title, first)
        if context.rank in leaders:
            encodes = compression is not None and tensor.numel()
            codec = bound_to(op, compression) if encodes else None
            total = yield from sum_encoded_over_group(
                op, leaders, total, codec, title, (divisor or 1) / (first or 1)
            )
        else:
            op.skip_exchanges(_SCATTER_AND_GATHER)
        value, transport = prepare_for_transport(context.local_transport, total)
        form = signature_of(title, tensor)
        yield from op.collective(machine.ranks, form, lambda: transport.ibroadcast(value, 0))
        return write_result(value.view(tensor.shape), tensor, out)

    call = None
    if compression is None:  # where all ranks share memory, machines make no difference
        ways = ways_of_reduction(members, tensor, reduction)
        call = members.slot_call(signature_of(title, tensor), tensor, out, ways)
    return members.operation(_VERB, steps, name, tensor, out, check=check, slot_call=call)


hierarchical_allreduce_nonblocking = nonblocking(hierarchical_allreduce)
hierarchical_allreduce_ = in_place(hierarchical_allreduce)
hierarchical_allreduce_nonblocking_ = nonblocking(hierarchical_allreduce_)
