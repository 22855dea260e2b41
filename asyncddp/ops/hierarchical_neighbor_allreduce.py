"""``hierarchical_neighbor_allreduce``: averages within machines, then with neighbour machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from msgspec.structs import replace

from asyncddp.context import Context, current
from asyncddp.engine import Handle, OperationExchanges, OperationSpec, Steps, run_collective
from asyncddp.errors import ArgumentError, PeerLeftError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allgather import start_gathering
from asyncddp.ops.allreduce import sum_over_group, ways_of_reduction
from asyncddp.ops.encoded_exchange import Compression, checked_compression
from asyncddp.ops.group_exchange import concatenate, exchange_all_gather
from asyncddp.ops.process_group import members_of, ranks_of_machine, require_member
from asyncddp.ops.reduce_op import ReduceOp, Reduction
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import accumulation_dtype, signature_of, single_output, write_result
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.ops.weighted_average import WeightResolver, Weights, exchange_and_average
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.tensor_lists import TensorOrTensors
from asyncddp.topology import Schedule, as_schedule, complete

_VERB = "hierarchical_neighbor_allreduce"


@of_tensors(ListKind.ELEMENTWISE, collective=True)
def hierarchical_neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Weights | None = None,
    dst_machine_weights: Weights | Iterable[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Average within each machine, then with the neighbour machines.

    .. math:: y_m = w_{mm} \bar x_m + \sum_{m'} w_{mm'} d_{m'm} \bar x_{m'}, \qquad
              \bar x_m = \frac{1}{L} \sum_{i \in m} x_i

    Every rank of a machine exchanges its own share of :math:`\bar x_m` with the rank of the same
    number on each neighbour machine, so that a machine sends one model whatever ``local_size()``.

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks. Or a list, tuple or dict of
            tensors, as one operation: see :ref:`lists-of-tensors`.
        self_weight: :math:`w_{mm}`.
        src_machine_weights: :math:`w_{mm'}` for the machines to receive from.
        dst_machine_weights: :math:`d_{mm'}` for the machines to send to; a list means 1 for each.
            By default the machine topology's weights; equal on all ranks of a machine.
        name: For messages; all ranks must give the same.
        round: Round of a time-varying topology; by default the number of earlier uses.
        round_integers: Average integers in float64 and round half to even; refused otherwise.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        compression: Compressor, or its name, of sent tensors. Other machines' tensors enter the
            average as decoded, the own tensor uncompressed.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y_m`, the same on all ranks of a machine: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No machine topology, machines of unequal size, or no such machine or weight.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank calls another verb, dtype, shape or neighbours.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, topology, torch
        >>> def mean():
        ...     bf.set_machine_topology(topology.ring(2))
        ...     x = torch.tensor([float(bf.rank())])
        ...     return bf.hierarchical_neighbor_allreduce(x).item()
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(mean)
        [1.5, 1.5, 1.5, 1.5]
    """
    context = current()
    out = single_output(_VERB, out)
    codec = checked_compression(_VERB, tensor, compression, context.local_size, filled_up=False)
    dtype = accumulation_dtype(_VERB, tensor, round_integers=round_integers)
    require_whole_machines(context)
    schedule = machine_schedule(context, by_hand=dst_machine_weights is not None)
    given = {
        "self_weight": self_weight,
        "src_machine_weights": src_machine_weights,
        "dst_machine_weights": dst_machine_weights,
    }
    weights = WeightResolver(_VERB, schedule, context.machine_rank, given, round)

    weighted = any(one is not None for one in given.values())
    return _operation(
        context, tensor, weights.row_at, dtype, codec, name, out, check=check, weighted=weighted
    )


def require_whole_machines(context: Context) -> None:
    """Raise an error unless all ranks take part, and machines have equally many."""
    require_member(_VERB, context)
    if len(context.members) < context.size:
        lost = set(range(context.size)).difference(context.members)
        raise PeerLeftError(
            f"rank {context.rank}: {_VERB}: expected all ranks of all machines, but those that "
            f"have left are {list_ranks(lost)}; take neighbor_allreduce, which goes on among the "
            "others"
        )
    if not context.machines.homogeneous:
        sizes = [len(machine) for machine in context.machines.members]
        raise ArgumentError(
            f"{_VERB}: expected machines with equally many ranks, numbered one machine after the "
            f"other; got machines of {sizes} ranks. Start equally many on each (slots=…), with "
            "ranks mapped by slot"
        )


def _operation(
    context: Context,
    tensor: torch.Tensor,
    row_at: Callable[[int], WeightRow],
    dtype: torch.dtype,
    codec: Compression,
    name: str | None,
    out: torch.Tensor | None,
    *,
    check: bool = False,
    weighted: bool = True,
) -> OperationSpec[torch.Tensor]:
    machine = ranks_of_machine(context)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        row = to_rank_row(context, row_at(op.round_number))
        total = yield from sum_over_group(op, machine, tensor, dtype, _VERB, machine.size)
        shares = total.reshape(-1).tensor_split(machine.size)
        share = shares[context.local_rank]
        averaged = yield from exchange_and_average(op, share, row, dtype, None, codec)
        flat, sizes = averaged.reshape(-1), [len(one) for one in shares]
        form = signature_of(_VERB, flat, ragged=True)
        if machine.transport is None:
            parts = yield from exchange_all_gather(op, machine.ranks, form, flat)
            whole = concatenate(parts)
        else:
            gather = partial(start_gathering, machine.transport, flat, sizes)
            whole = yield from run_collective(op, machine.ranks, form, gather)
        return write_result(whole.view(total.shape), tensor, out)

    members, call = members_of(_VERB, None), None
    if context.machine_size == 1 and codec is None and not weighted:
        title = _VERB + (f" {name!r}" if name else "")
        ways = ways_of_reduction(members, tensor, Reduction(ReduceOp.AVERAGE, dtype))
        call = members.slot_call(signature_of(title, tensor), tensor, out, ways)
    return members.operation(_VERB, steps, name, tensor, out, check=check, slot_call=call)


hierarchical_neighbor_allreduce_nonblocking = nonblocking(hierarchical_neighbor_allreduce)
hierarchical_neighbor_allreduce_ = in_place(hierarchical_neighbor_allreduce)
hierarchical_neighbor_allreduce_nonblocking_ = nonblocking(hierarchical_neighbor_allreduce_)


def average_by_machine_row_nonblocking(
    tensor: torch.Tensor,
    row: WeightRow,
    *,
    name: str,
    compression: Compression = None,
    out: torch.Tensor | None = None,
) -> Handle[torch.Tensor]:
    """Start a hierarchical average; ``row`` gives the weights between machines; collective."""
    context = current()
    codec = checked_compression(_VERB, tensor, compression, context.local_size, filled_up=False)
    dtype = accumulation_dtype(_VERB, tensor, round_integers=False)

    def plan() -> OperationSpec[torch.Tensor]:
        require_whole_machines(context)
        return _operation(context, tensor, lambda number: row, dtype, codec, name, out)

    operation = plan()
    if context.engine.membership is not None:  # once a rank has left meanwhile, it fails on all
        operation = replace(operation, again=plan)
    return context.engine.submit(operation, about=(tensor,))


def machine_schedule(context: Context, *, by_hand: bool) -> Schedule:
    """Return the machine topology; it may be unset if the call gives all weights."""
    if by_hand and context.topologies.machine_given is None:
        return as_schedule(complete(context.machine_size))
    return context.topologies.machines


def to_rank_row(context: Context, row: WeightRow) -> WeightRow:
    """Convert a row of weights between machines to weights between ranks of equal local rank."""
    machines, local_rank, row_of = context.machines.members, context.local_rank, row.row_of

    def same_local_rank(weights: Mapping[int, float]) -> dict[int, float]:
        return {machines[machine][local_rank]: weight for machine, weight in weights.items()}

    def row_of_rank(rank: int) -> tuple[float, Mapping[int, float]]:
        assert row_of is not None
        own, sources = row_of(rank // len(machines[0]))
        return own, same_local_rank(sources)

    src_weights, dst_weights = same_local_rank(row.src_weights), same_local_rank(row.dst_weights)
    rows = None if row_of is None else row_of_rank
    return WeightRow(row.self_weight, src_weights, dst_weights, rows, row.by_hand)
