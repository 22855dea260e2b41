"""``neighbor_allreduce``: computes a weighted average of a tensor with the neighbours' tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from msgspec.structs import replace

from asyncddp.context import Context, current
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import Handle, OperationExchanges, OperationSpec, Steps
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.encoded_exchange import Compression, checked_compression
from asyncddp.ops.shared_memory_fast_path import NeighborAverageFastPath
from asyncddp.ops.tensor_list_call import FastCall, ListKind
from asyncddp.ops.timeline_recording_fast_path import TimelineRecordingFastPath
from asyncddp.ops.validation import (
    accumulation_dtype,
    can_write_result,
    signature_of,
    single_output,
    write_result,
)
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.ops.weighted_average import (
    WeightResolver,
    Weights,
    exchange_and_average,
    refuse_scaling,
)
from asyncddp.tensors.byte_views import has_plain_memory
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.tensors.tensor_lists import TensorOrTensors
from asyncddp.torch_modes import transforming

_VERB = "neighbor_allreduce"


def _find_fast_path(
    tensor: torch.Tensor | None = None,
    *more: object,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: torch.Tensor | None = None,
    members: str = "",
    **unknown: object,
) -> FastCall | None:
    """Return the fast path of this name, dtype and shape with its arguments, or None."""
    del round_integers
    if tensor is None or more or unknown:
        return None  # as the engine's path will report
    context = current()
    try:
        path: NeighborAverageFastPath | None = context.engine.fast_paths.get(
            (name, tensor.dtype, tensor.shape, members)
        )
    except (AttributeError, RuntimeError, TypeError):
        return None  # no tensor or no name, as the engine's path will report
    if path is None or check or not has_plain_memory(tensor):
        return None
    if compression is not None or transforming() is not None:
        return None
    if out is not None and out is not tensor and not can_write_result(out, tensor):
        return None
    if out is not None and out.is_inference() and not torch.is_inference_mode_enabled():
        return None  # as the engine's path will report
    if round is not None and (type(round) is not int or round < 0):
        return None  # as the engine's path will report
    if dst_weights is None and src_weights is None and self_weight is None:
        return path, path.weight_row(context.topologies, round), tensor, out
    if context.config.elastic:
        return None  # the topology may be another one when the call is counted
    given = {"self_weight": self_weight, "src_weights": src_weights, "dst_weights": dst_weights}
    weights = WeightResolver(_VERB, context.topologies.ranks, context.rank, given, round)
    row = weights.row_at(context.engine.round_count(_VERB, name or f"{_VERB}.noname"))
    return path, row, tensor, out


@of_tensors(ListKind.ELEMENTWISE, fast_path=_find_fast_path)
def neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    round_integers: bool = False,
    check: bool = False,
    compression: Compression = None,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Return the weighted average of a tensor and the neighbours' tensors.

    .. math:: y_i = w_{ii} x_i + \sum_{j \in \mathrm{src}(i)} w_{ij} d_{ji} x_j

    The weights come from the topology if none are given. With ``self_weight`` and ``src_weights``
    the topology's neighbours are weighted by hand; an in-neighbour that is left out counts 0. With
    all three the neighbours are set by hand as well, and the topology plays no part.

    Args:
        tensor: :math:`x_i`, of any shape and on any device; neighbours' agree in shape and dtype.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        self_weight: :math:`w_{ii}`.
        src_weights: :math:`w_{ij}` for the ranks j to receive from.
        dst_weights: :math:`d_{ij}` for the ranks j to send to; a list of ranks means 1 for each, as
            it must be for integers.
        name: Matches this call with the neighbours' calls of that name; by call order if None.
        round: Round of a time-varying topology; by default the number of earlier uses of the name.
        round_integers: Average integers in float64 and round half to even; refused otherwise.
        check: Return only after all receivers have confirmed that they expect the tensor.
        compression: Compressor, or its name, of sent tensors. Neighbours' tensors enter the average
            as decoded, the own tensor uncompressed.
        out: Tensor into which the result is written, which may be ``tensor`` itself. If a neighbour
            is lost during the call, parts of it may already be averages.

    Returns:
        :math:`y_i`, ``out`` or a new tensor with the shape, dtype and device of ``tensor``.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A rank, weight or combination of arguments that cannot be.
        DtypeError: The dtype cannot be sent.
        MismatchError: A neighbour calls another verb, dtype, shape or neighbours under this name.
        WaitTimeoutError: A neighbour has not come by the deadline.

    Example:
        >>> import asyncddp as bf, topology, torch
        >>> def mean_of_two():
        ...     bf.set_topology(topology.one_peer_exponential(4))
        ...     x = bf.neighbor_allreduce(torch.tensor([float(bf.rank())]))
        ...     return bf.neighbor_allreduce(x).item()
        >>> with bf.local_world(4) as world:
        ...     world.run(mean_of_two)
        [1.5, 1.5, 1.5, 1.5]

    References:
        Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
        NeurIPS 2021.
    """
    context = current()
    out = single_output(_VERB, out)
    codec = None if compression is None else checked_compression(_VERB, tensor, compression)
    dtype = accumulation_dtype(_VERB, tensor, round_integers=round_integers)
    if not DTYPES[tensor.dtype].averages:
        refuse_scaling(_VERB, "dst_weights", dst_weights, tensor.dtype)
    given = {"self_weight": self_weight, "src_weights": src_weights, "dst_weights": dst_weights}
    weights = WeightResolver(_VERB, context.topologies.ranks, context.rank, given, round)

    def row_at(op: OperationExchanges) -> WeightRow:
        return weights.row_at(op.round_number, context.topologies.of_round(*op.key))

    return _operation(context, tensor, row_at, dtype, codec, name, out, check=check)


def _operation(
    context: Context,
    tensor: torch.Tensor,
    row_at: Callable[[OperationExchanges], WeightRow],
    dtype: torch.dtype,
    codec: Compression,
    name: str | None,
    out: torch.Tensor | None,
    *,
    check: bool = False,
) -> OperationSpec[torch.Tensor]:
    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        row = row_at(op)
        op.tolerates_loss = True
        total = yield from exchange_and_average(op, tensor, row, dtype, out, codec)
        if dtype == tensor.dtype and codec is None and not context.config.check:
            _register_fast_path(context, name, op, tensor)
        return write_result(total, tensor, out)

    order = stream_ordering_of(tensor, out)
    return OperationSpec(_VERB, steps, name, check=check, stream_ordering=order)


neighbor_allreduce_nonblocking = nonblocking(neighbor_allreduce)
neighbor_allreduce_ = in_place(neighbor_allreduce)
neighbor_allreduce_nonblocking_ = nonblocking(neighbor_allreduce_)


def _register_fast_path(
    context: Context, given: str | None, op: OperationExchanges, tensor: torch.Tensor
) -> None:
    """Register a fast path for tensors like this one if its name has a persistent channel."""
    fast_paths, tracer = context.engine.fast_paths, context.tracer
    key = given, tensor.dtype, tensor.shape, op.members
    if key in fast_paths:
        return
    form = replace(signature_of(_VERB, tensor), members=op.members)
    channel = context.engine.matcher.channels.get(op.key.name, form)
    if channel is not None and tensor.is_cpu:
        facts = context, channel
        fast_paths[key] = (
            NeighborAverageFastPath(*facts)
            if tracer is None
            else TimelineRecordingFastPath(tracer, *facts)
        )


def find_fast_path(
    context: Context, row: WeightRow, tensor: torch.Tensor, name: str
) -> Callable[[], bool] | None:
    """Return a function that averages a tensor in place on the fast path, by given weights.

    The function returns False if the fast path cannot do it. If there is no fast path, or a busy
    one, None is returned.
    """
    path: NeighborAverageFastPath | None = context.engine.fast_paths.get(
        (name, tensor.dtype, tensor.shape, "")
    )
    if path is None or not tensor.is_cpu or context.config.check or not path.is_ready(row):
        return None
    return lambda: path.run(row, tensor, tensor) is not None


def average_by_row_nonblocking(
    tensor: torch.Tensor,
    row: WeightRow,
    *,
    name: str,
    compression: Compression = None,
    out: torch.Tensor | None = None,
) -> Handle[torch.Tensor]:
    """Start averaging a tensor with the neighbours in ``row``, by its weights."""
    context = current()
    path: NeighborAverageFastPath | None = context.engine.fast_paths.get(
        (name, tensor.dtype, tensor.shape, "")
    )
    fits = out is None or out is tensor or can_write_result(out, tensor)
    if path is not None and compression is None and fits and has_plain_memory(tensor):
        handle = path.start(row, tensor, out)
        if handle is not None:
            return handle
    codec = checked_compression(_VERB, tensor, compression)
    dtype = accumulation_dtype(_VERB, tensor, round_integers=False)
    operation = _operation(context, tensor, lambda op: row, dtype, codec, name, out)
    return context.engine.submit(replace(operation, begun=True), about=(tensor,))
