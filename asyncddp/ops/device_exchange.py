"""Weighted average of a device tensor with neighbours' tensors, computed on that device."""

from __future__ import annotations

import torch

from asyncddp.device.streams import DeviceStreams
from asyncddp.engine import OperationExchanges, Steps
from asyncddp.kernels.device_weighted_sum import weighted_sum_on_device
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.result_memory import can_write_result
from asyncddp.ops.validation import signature_of
from asyncddp.tensors.allocation import empty_like
from asyncddp.tensors.byte_views import dense


def exchange_and_average_on_device(
    op: OperationExchanges,
    tensor: torch.Tensor,
    row: WeightRow,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    streams: DeviceStreams,
) -> Steps[torch.Tensor]:
    """Send a tensor, receive the neighbours', and return the weighted sum.

    Where the transport lets ranks read each other's memory nothing is copied, or once where the
    result replaces the tensor: neighbours then read a copy. Elsewhere tensors are received first.

    Args:
        op: The operation context of the verb.
        tensor: On the device.
        row: The weights.
        dtype: In which sums are formed.
        out: Where the result may be written.
        streams: The streams of the device.

    Returns:
        The sum on the device, in the tensor's dtype: in ``out`` where that is possible.
    """
    own = dense(tensor)
    into = out.detach() if out is not None and can_write_result(out, own) else empty_like(own)
    in_place = into.data_ptr() == own.data_ptr()
    form = signature_of(op.verb, own)
    rows = row.describe_rows() if op.check else None
    targets = row.dst_weights
    request = op.exchange(form, row.sources, targets, streams, peer_access=True, rows=rows)
    op.export(request, row.dst_weights, own, lasting=not in_place)
    for peer in row.sources:
        yield request.receives[peer]
    if in_place:
        yield request.buffers_free()
    others = [request.receives[peer].take() for peer in row.sources]
    weighted_sum_on_device(row, dtype, own, others, into)
    others.clear()
    for peer in row.sources:
        request.receives[peer].release()
    yield request.sent()  # peers have queued what reads ours
    return out if out is not None and into.data_ptr() == out.data_ptr() else into
