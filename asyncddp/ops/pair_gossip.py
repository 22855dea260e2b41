"""``pair_gossip``: computes a weighted average of the tensors of two ranks."""

from __future__ import annotations

import torch

from asyncddp.context import current
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps, require_name
from asyncddp.errors import ArgumentError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.encoded_exchange import Compression, checked_compression
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import accumulation_dtype, check_rank, single_output, write_result
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.ops.weighted_average import exchange_and_average, require_finite
from asyncddp.tensors.tensor_lists import TensorOrTensors


@of_tensors(ListKind.ELEMENTWISE)
def pair_gossip(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    *,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Average with one partner rank, which must name this rank in turn.

    .. math:: y_i = w_\mathrm{self} x_i + w_\mathrm{pair} x_j

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on both ranks. Or a list, tuple or dict of
            tensors, as one operation: see :ref:`lists-of-tensors`.
        target_rank: The partner j.
        self_weight: Weight of the own tensor; 1/2 if neither weight is given.
        pair_weight: Weight of the partner's.
        name: Matches the two calls. Uses of a name are counted for each pair by itself, so that a
            rank may sit rounds out; by the order of this pair's calls if None.
        round_integers: Average integers in float64 and round half to even; refused otherwise.
        check: Return only after the partner has confirmed that it expects the tensor.
        compression: Compressor, or its name, of sent tensors. The partner's tensor enters the
            average as decoded, the own tensor uncompressed.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y_i`: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No such partner, or one weight without the other.
        DtypeError: The dtype cannot be sent.
        MismatchError: The partner calls another verb, dtype, shape or partner under this name.
        WaitTimeoutError: The partner has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(
        ...         lambda: bf.pair_gossip(torch.tensor([1.0 * bf.rank()]), 1 - bf.rank()).item()
        ...     )
        [0.5, 0.5]
    """
    title, context = "pair_gossip", current()
    require_name(title, name)
    out = single_output(title, out)
    codec = checked_compression(title, tensor, compression)
    dtype = accumulation_dtype(title, tensor, round_integers=round_integers)
    peer = check_rank(title, "target_rank", target_rank, context.size, but=context.rank)
    if (self_weight is None) != (pair_weight is None):
        raise ArgumentError(
            f"{title}: arguments self_weight, pair_weight: expected both or neither"
        )
    own = require_finite(title, "self_weight", 0.5 if self_weight is None else self_weight)
    other = require_finite(title, "pair_weight", 0.5 if pair_weight is None else pair_weight)
    row = WeightRow(own, {peer: other}, {peer: 1.0})

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        total = yield from exchange_and_average(op, tensor, row, dtype, out, codec)
        return write_result(total, tensor, out)

    low, high = sorted((context.rank, peer))
    label, order = f"{name or title}.{low}-{high}", stream_ordering_of(tensor, out)
    return OperationSpec(title, steps, label, check=check, stream_ordering=order)


pair_gossip_nonblocking = nonblocking(pair_gossip)
pair_gossip_ = in_place(pair_gossip)
pair_gossip_nonblocking_ = nonblocking(pair_gossip_)
