"""Weighted average of a tensor and the neighbours' tensors: weights, exchange and sum."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ChunkedExchange, OperationExchanges, Steps
from asyncddp.engine.exchange_request import BufferReuseWaitCondition
from asyncddp.errors import ArgumentError
from asyncddp.kernels.device_weighted_sum import weighted_sum_on_device
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.encoded_exchange import Compression, average_encoded, bound_to
from asyncddp.ops.validation import can_write_result, check_rank, is_same_memory, signature_of
from asyncddp.tensors.allocation import empty, empty_like
from asyncddp.tensors.byte_views import dense, on_host
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.topology import Schedule

Weights: TypeAlias = Mapping[int, float]


class WeightResolver:
    """Resolver of an averaging call's weights: those given by the caller, or the topology's.

    ``place`` is this rank or, with the topology of machines, this machine; ``given`` holds the
    verb's three weight arguments by name: own, sources, targets.
    """

    def __init__(
        self,
        verb: str,
        schedule: Schedule,
        place: int,
        given: Mapping[str, float | Weights | Iterable[int] | None],
        round: int | None,  # noqa: A002 - the field's word
    ) -> None:
        self._verb, self._schedule, self._place, self._round = verb, schedule, place, round
        self._names = list(given)
        own, sources, targets = given.values()
        self._own: float | None = None
        self._sources: dict[int, float] | None = None
        self._targets: dict[int, float] | None = None
        if own is None and sources is None and targets is None:
            return
        if own is None or sources is None:
            there = [name for name, value in given.items() if value is not None]
            raise ArgumentError(
                f"{verb}: arguments {', '.join(given)}: expected none, the first two, or all "
                f"three; got {', '.join(there)}"
            )
        self._own = require_finite(verb, self._names[0], own)
        self._sources = self._checked(1, sources)
        if targets is not None:
            self._targets = self._checked(2, targets)

    def row_at(self, step: int, schedule: Schedule | None = None) -> WeightRow:
        """Return the weight row of a round, by another schedule where one is given."""
        if self._own is not None and self._sources is not None and self._targets is not None:
            return WeightRow(self._own, self._sources, self._targets)
        number = step if self._round is None else self._round
        schedule = schedule or self._schedule
        near = schedule.neighbors(self._place, number)

        def row_of(rank: int) -> tuple[float, Mapping[int, float]]:
            others = schedule.neighbors(rank, number)
            return others.self_weight, others.src_weights

        targets = dict.fromkeys(near.dst_ranks, 1.0)
        if self._own is None or self._sources is None:
            return WeightRow(near.self_weight, near.src_weights, targets, row_of)
        strangers = sorted(set(self._sources) - set(near.src_weights))
        if strangers:
            raise ArgumentError(
                f"{self._verb}: argument {self._names[1]}: expected in-neighbours of {self._place} "
                f"in {self._schedule.name}, {sorted(near.src_weights)}, got {strangers}; give "
                f"{self._names[2]} as well to choose neighbours freely"
            )
        every = {peer: self._sources.get(peer, 0.0) for peer in near.src_weights}
        return WeightRow(self._own, every, targets, row_of, by_hand=True)

    def _checked(self, index: int, weights: object) -> dict[int, float]:
        verb, argument = self._verb, self._names[index]
        if index == 2 and isinstance(weights, Iterable) and not isinstance(weights, Mapping):
            ranks = list(weights)
            if len(set(ranks)) != len(ranks):
                raise ArgumentError(
                    f"{verb}: argument {argument}: expected each rank once, got {ranks}"
                )
            weights = dict.fromkeys(ranks, 1.0)
        if not isinstance(weights, Mapping):
            raise ArgumentError(
                f"{verb}: argument {argument}: expected a mapping {{rank: weight}}, got "
                f"{type(weights).__name__}"
            )
        checked = {}
        for rank, weight in weights.items():
            peer = check_rank(verb, argument, rank, self._schedule.n, but=self._place)
            checked[peer] = require_finite(verb, f"{argument}[{peer}]", weight)
        return dict(sorted(checked.items()))


def refuse_scaling(verb: str, argument: str, targets: object, dtype: torch.dtype) -> None:
    """Raise ArgumentError unless send factors are 1, for a dtype that cannot be scaled."""
    scaled = {r: w for r, w in targets.items() if w != 1} if isinstance(targets, Mapping) else {}
    if scaled:
        name = DTYPES[dtype].name
        raise ArgumentError(
            f"{verb}: argument {argument}: expected 1 for every rank, since {name} values are sent "
            f"as they are, got {scaled}; scale with src_weights, or cast to float first"
        )


def require_finite(verb: str, argument: str, value: object) -> float:
    """Return a number as a float; raise ArgumentError unless it is finite."""
    try:
        result = float(value)  # type: ignore[arg-type]  # whatever float() accepts is welcome
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise ArgumentError(f"{verb}: argument {argument}: expected a finite number, got {value!r}")
    return result


def exchange_and_average(
    op: OperationExchanges,
    tensor: torch.Tensor,
    row: WeightRow,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    compression: Compression = None,
) -> Steps[torch.Tensor]:
    r"""Exchange tensors with neighbours; return the weighted sum, in ``out`` if possible.

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
    """Exchange device tensors with neighbours; return the weighted sum.

    If the transport lets ranks read each other's memory, neighbours read a copy. Otherwise tensors
    are received first.
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
    row = row.without([peer for peer in row.sources if request.receives[peer].left])
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
    """Publish a tensor chunk by chunk, and average each chunk with the neighbours' chunks."""
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
            if source.left:
                row = row.without([source.peer])
            else:
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
    """Return memory for the result: a tensor received by message, if reusable, or new memory."""
    spare = exchange.first_received() if own.dtype == dtype and row.reuses_received else None
    return empty(own.shape, own.dtype) if spare is None else spare
