"""Averages while some ranks have run out of input and no longer train (like torch's ``Join``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.errors import ArgumentError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.allreduce import sum_over_group
from asyncddp.ops.encoded_exchange import Compression, bound_to, sum_encoded_over_group
from asyncddp.ops.process_group import members_of
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import accumulation_dtype, single_output, write_result
from asyncddp.ops.variants import blocking, in_place, nonblocking, of_tensors
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.tensor_lists import TensorOrTensors


def renormalise(
    row: WeightRow, training: Collection[int], *, pushed_by: int | None = None
) -> WeightRow:
    r"""Return this rank's weight row, with the weights of finished ranks moved to its own weight.

    .. math:: w'_{ii} = w_{ii} + \sum_{j \notin T} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \in T)

    T, ``training``, is the set of ranks that still train. Rows still sum to one. Columns still do
    if the weights are symmetric; otherwise the mean over the training ranks is no longer preserved
    exactly. If the columns of W sum to one instead of the rows, pass this rank as ``pushed_by``: it
    then keeps the weights that it would give away:
    :math:`w'_{ii} = w_{ii} + \sum_{j \notin T} w_{ji}`.

    Raises:
        ArgumentError: Tensors are scaled by their senders, so that nobody else knows by how much;
            or it is not known what a rank gives, since weights are set by hand.
    """
    _require_common_factor(row)
    moved = row.src_weights if pushed_by is None else _given_weights(row, pushed_by)
    own = math.fsum([row.self_weight, *(w for peer, w in moved.items() if peer not in training)])
    sources = {peer: weight for peer, weight in row.src_weights.items() if peer in training}
    targets = {peer: factor for peer, factor in row.dst_weights.items() if peer in training}
    return WeightRow(own, sources, targets)


def among_active(row: WeightRow, rank: int, training: Collection[int]) -> WeightRow:
    r"""Return this rank's weights for the mean over training ranks; finished ranks only receive.

    .. math:: w'_{ij} = \frac{1}{|T|}\ (j \in T), \qquad w'_{ij} = 0\ (j \notin T)

    Raises:
        ArgumentError: As of :func:`renormalise`.
    """
    _require_common_factor(row)
    share = 1.0 / len(training)
    sources = {peer: share for peer in row.src_weights if peer in training}
    trains = rank in training
    return WeightRow(share if trains else 0.0, sources, row.dst_weights if trains else {})


def _given_weights(row: WeightRow, rank: int) -> Mapping[int, float]:
    """Return the weights that out-neighbours give to this rank's tensor."""
    if row.row_of is None:
        raise ArgumentError(
            "join: src_weights set by hand: expected None, since a rank keeps what it would give "
            "to one that is done, without knowing its weight; give a topology"
        )
    return {target: row.row_of(target)[1][rank] for target in row.targets}


def _require_common_factor(row: WeightRow) -> None:
    if row.common_factor != 1.0:
        raise ArgumentError(
            "join: dst_weights set by hand: expected a factor of 1 for every rank, since a rank "
            "cannot take over the share of one that is done without knowing its factor, got "
            f"{dict(row.dst_weights)}; give a list of ranks, and weigh with src_weights"
        )


@blocking
def skip_round(
    tensor: torch.Tensor, *, name: str, compression: Compression = None
) -> OperationSpec[torch.Tensor]:
    """Count a round of a name and return the tensor unchanged, while other ranks average."""
    del compression

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        del op
        yield from ()
        return tensor

    return OperationSpec("neighbor_allreduce", steps, name, begun=True)


@of_tensors(ListKind.ELEMENTWISE)
def average_active_ranks(
    tensor: torch.Tensor,
    active_ranks: Collection[int],
    average: bool = True,
    *,
    name: str,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Average a tensor over the ranks that still train; collective over all ranks.

    .. math:: y = \frac{1}{|T|} \sum_{j \in T} x_j

    T, ``active_ranks``, is the set of ranks that still train; the tensors of all other ranks count
    as zeros. Without ``average`` the result is the sum.
    """
    group, out = members_of("allreduce", None), single_output("allreduce", out)
    number = len(active_ranks)
    dtype = accumulation_dtype("allreduce", tensor, round_integers=False)
    title = f"allreduce({'average' if average else 'sum'} over {number} that train) {name!r}"
    divisor = number if average else None
    given = tensor if group.context.rank in active_ranks else zeros_like(tensor)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        op.next_may_start = compression is not None  # by messages, which are matched by key
        if compression is not None:
            codec = bound_to(op, compression)
            ranks, scale = group.ranks, divisor or 1
            total = yield from sum_encoded_over_group(op, ranks, given, codec, title, scale)
        else:
            total = yield from sum_over_group(op, group, given, dtype, title, divisor)
        return write_result(total, tensor, out)

    return group.operation("allreduce", steps, name, given, overlaps=True)


skip_round_nonblocking = nonblocking(skip_round)
average_active_ranks_nonblocking = nonblocking(average_active_ranks)
average_active_ranks_nonblocking_ = nonblocking(in_place(average_active_ranks))
