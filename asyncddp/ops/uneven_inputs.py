"""Averaging while some ranks have run out of input and no longer train (as torch's ``Join``)."""

from __future__ import annotations

from collections.abc import Collection

import torch

from asyncddp.context import current
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.errors import ArgumentError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import sum_over_group
from asyncddp.ops.encoded_exchange import Compression, bound_to, sum_encoded_over_group
from asyncddp.ops.validation import accumulation_dtype, single_output, write_result
from asyncddp.ops.variants import blocking, elementwise, in_place, nonblocking
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.tensor_lists import TensorOrTensors


def renormalise(row: WeightRow, training: Collection[int]) -> WeightRow:
    r"""Return this rank's weight row with the weights of ranks that have finished added to its own.

    .. math:: w'_{ii} = w_{ii} + \sum_{j \notin T} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \in T)

    T, ``training``, are the ranks that still train. Rows still sum to one. Columns do where weights
    are symmetric; elsewhere the mean over those who train is no longer kept exactly.

    Raises:
        ArgumentError: Tensors are scaled by their senders, so that nobody else knows by how much.
    """
    if row.common_factor != 1.0:
        raise ArgumentError(
            "join: dst_weights set by hand: expected a factor of 1 for every rank, since a rank "
            "cannot take over the share of one that is done without knowing its factor, got "
            f"{dict(row.dst_weights)}; give a list of ranks, and weigh with src_weights"
        )
    kept = row.without([peer for peer in row.src_weights if peer not in training])
    targets = {peer: factor for peer, factor in row.dst_weights.items() if peer in training}
    return WeightRow(kept.self_weight, kept.src_weights, targets)


@blocking
def skip_round(
    tensor: torch.Tensor, *, name: str, compression: Compression = None
) -> OperationSpec[torch.Tensor]:
    """Count a round of a name and return the tensor unchanged, while others average under it."""
    del compression

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        del op
        yield from ()
        return tensor

    return OperationSpec("neighbor_allreduce", steps, name)


@elementwise
def average_active_ranks(
    tensor: torch.Tensor,
    active_ranks: Collection[int],
    average: bool = True,
    *,
    name: str,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Average over the ranks that still train, while all ranks take part in the collective.

    .. math:: y = \frac{1}{|T|} \sum_{j \in T} x_j

    T are the ``active_ranks``, which still train; in place of the others' tensors zeros count.
    Without ``average`` it is the sum.
    """
    context, number, out = current(), len(active_ranks), single_output("allreduce", out)
    dtype = accumulation_dtype("allreduce", tensor, round_integers=False)
    title = f"allreduce({'average' if average else 'sum'} over {number} that train) {name!r}"
    divisor = number if average else None
    given = tensor if context.rank in active_ranks else zeros_like(tensor)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        group, transport = range(context.size), context.transport
        op.next_may_start = compression is not None  # by messages, which are matched by key
        if compression is not None:
            codec = bound_to(op, compression)
            total = yield from sum_encoded_over_group(op, group, given, codec, title, divisor or 1)
        else:
            total = yield from sum_over_group(op, group, transport, given, dtype, title, divisor)
        return write_result(total, tensor, out)

    order = stream_ordering_of(given)
    return OperationSpec(
        "allreduce", steps, name, ordered=True, overlaps=True, stream_ordering=order
    )


skip_round_nonblocking = nonblocking(skip_round)
average_active_ranks_nonblocking = nonblocking(average_active_ranks)
average_active_ranks_nonblocking_ = nonblocking(in_place(average_active_ranks))
