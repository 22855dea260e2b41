"""Exchange of a tensor with neighbours, and the weighted average of what is received."""

from __future__ import annotations

import time

import torch

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ChunkedExchange, OperationExchanges, Steps
from asyncddp.engine.exchange_request import BufferReuseWaitCondition
from asyncddp.kernels.device_weighted_sum import weighted_sum_on_device
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.encoded_exchange import Compression, average_encoded, bound_to
from asyncddp.ops.validation import can_write_result, is_same_memory, signature_of
from asyncddp.tensors.allocation import empty, empty_like
from asyncddp.tensors.byte_views import dense, on_host


def exchange_and_average(
    op: OperationExchanges,
    tensor: torch.Tensor,
    row: WeightRow,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    compression: Compression = None,
) -> Steps[torch.Tensor]:
    r"""Send a tensor, receive the neighbours', and return the weighted sum, if possible in ``out``.

    .. math:: y_i = w_{ii} x_i + \sum_j w_{ij} d_{ji} x_j
    """
    if compression is not None and tensor.numel():
        codec = bound_to(op, compression)
        return (yield from average_encoded(op, tensor, row, dtype, codec))
    streams = streams_of(tensor)
    if streams is not None:
        return (yield from _exchange_on_device(op, tensor, row, dtype, out, streams))
    own = on_host(tensor)
    exchange, request = op.chunked_exchange(signature_of(op.verb, own), row)
    by_message = [peer for peer in sorted(row.dst_weights) if peer not in exchange.targets]
    for peer in by_message:
        factor = row.dst_weights[peer]
        op.send(request, peer, own if factor == 1.0 else own * factor)
    if by_message and can_write_result(out, own) and is_same_memory(out, own):
        yield request.sent()
    result = yield from average_chunks(exchange, own, row, dtype, out)
    yield request.sent()
    return result


def _exchange_on_device(
    op: OperationExchanges,
    tensor: torch.Tensor,
    row: WeightRow,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    streams: DeviceStreams,
) -> Steps[torch.Tensor]:
    """Send a tensor, receive the neighbours', and return the weighted sum.

    Where the transport lets ranks read each other's memory, neighbours read a copy. Elsewhere
    tensors are received first.
    """
    own = dense(tensor)
    total = out if can_write_result(out, own) else empty_like(own)
    into = total.detach()
    form, targets = signature_of(op.verb, own), row.dst_weights
    request = op.exchange(form, row.sources, targets, streams, peer_access=True, row=row)
    op.export(request, targets, own)
    for peer in row.sources:
        yield request.receives[peer]
    if is_same_memory(into, own):
        yield BufferReuseWaitCondition(request)
    others = [request.receives[peer].take() for peer in row.sources]
    weighted_sum_on_device(row, dtype, own, others, into)
    others.clear()
    for peer in row.sources:
        request.receives[peer].release()
    yield request.sent()  # peers have queued what reads ours
    return total


def average_chunks(
    exchange: ChunkedExchange,
    own: torch.Tensor,
    row: WeightRow,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    start: int = 0,
) -> Steps[torch.Tensor]:
    """Publish a tensor chunk by chunk, and average each chunk with the neighbours'."""
    result = out if can_write_result(out, own) else None
    flat, layout, tracing = own.reshape(-1), exchange.layout, exchange.channels.tracing
    factor = row.dst_weights[exchange.targets[0]] if exchange.targets else 1.0
    place = None
    if exchange.targets and factor == 1.0 and not is_same_memory(result, own):
        # in place, neighbours would read what is being written
        place = exchange.channels.handle_of(own)
    for number in range(start, layout.num_chunks):
        while not exchange.for_chunk(number).done():
            yield exchange
        exchange.send_chunk(number, flat, factor, place)
        others = []
        for source in exchange.sources:
            while not source.for_chunk(number).done():
                yield source
            others.append(source.take())
        result = _result_memory(exchange, own, row, dtype) if result is None else result
        into = result.detach().view(-1)
        begun = time.monotonic_ns()
        chunk = layout.chunk(into, number)
        row.weighted_sum_in(dtype, layout.chunk(flat, number), others, chunk)
        tracing.average(exchange.signature.verb, exchange.key.name, begun, chunk, row.sources)
        del others
        for source in exchange.sources:
            source.release()
    if place is not None:
        taken = exchange.chunks_read(layout.num_chunks)
        while not taken.done():
            yield taken
    return own if result is None else result


def _result_memory(
    exchange: ChunkedExchange, own: torch.Tensor, row: WeightRow, dtype: torch.dtype
) -> torch.Tensor:
    """Return memory for the result: that of a tensor received by message, or new memory."""
    spare = exchange.first_received() if own.dtype == dtype and row.reuses_received else None
    return empty(own.shape, own.dtype) if spare is None else spare
