"""Fast path of repeated ``neighbor_allgather``: runs on the calling thread, over shared memory.

It uses the persistent channel of a name, dtype and shape. If a neighbour's tensor comes by message
this time, or through the channel of another shape, the engine runs the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch.autograd import profiler
from typing_extensions import override

from asyncddp.context import Context, current
from asyncddp.engine import (
    ChunkedExchange,
    ExchangeSignature,
    Handle,
    OperationExchanges,
    RaggedExchange,
    Steps,
)
from asyncddp.engine.messages import MatchKey
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.deferred_average import detached
from asyncddp.ops.shared_memory_fast_path import NeighborAverageFastPath
from asyncddp.ops.validation import signature_of
from asyncddp.shm.chunk_layout import ChunkLayout
from asyncddp.tensors.byte_views import has_plain_memory
from asyncddp.torch_modes import normal_mode, transforming

_VERB = "neighbor_allgather"


class GatherFastPath(NeighborAverageFastPath):
    """Fast path of one repeated ``neighbor_allgather``, for one name, dtype and shape."""

    @override
    def run(
        self, row: WeightRow, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        channel = self.channel
        if profiler._is_profiler_enabled or not row.sources or not self.is_ready(row):
            return None
        step = self._engine.count_use(self.verb, self.name, channel.in_flight, self._view)
        if step is None:
            return None
        found: torch.Tensor | Handle[torch.Tensor] | None = None
        try:
            found = self._gather(step, row, detached(tensor))
        finally:
            if found is None:
                self._abort(step, row)
        return found.wait() if isinstance(found, Handle) else found

    @override
    def start(
        self, row: WeightRow, tensor: torch.Tensor, out: torch.Tensor | None
    ) -> Handle[torch.Tensor] | None:
        return None

    def _gather(
        self, step: int, row: WeightRow, own: torch.Tensor
    ) -> torch.Tensor | Handle[torch.Tensor]:
        channel, send_ring = self.channel, self.channel.send_ring
        rings = [channel.receive_rings[peer] for peer in row.sources]

        def all_published() -> bool:
            return all([ring.read_whole(step) is not None for ring in rings])

        sent = send_ring is None or send_ring.try_send(step, row.targets, own)
        if sent and self._wait_briefly(all_published, pure=True):
            rows = _concatenate([ring.whole_slots[step & 1] for ring in rings])
            for ring in rings:
                ring.acknowledge(step, 1)
            channel.record(step, row.sources, row.targets)
            channel.in_flight.popleft()
            return rows
        exchange = self._make_exchange(step, row, int(sent))
        return self._submit_rest(exchange, _gather_rows(exchange, own))

    @override
    def _make_exchange(self, step: int, row: WeightRow, sent_chunks: int) -> ChunkedExchange:
        channel, key = self.channel, MatchKey(self.name, step)
        form = replace(channel.signature, shape=(None, *channel.signature.shape[1:]))
        facts = key, form, row.sources, row.targets
        return RaggedExchange(self._channels, channel, *facts, begun=True, published=sent_chunks)


def gather_on_host(
    op: OperationExchanges,
    form: ExchangeSignature,
    sources: Sequence[int],
    targets: Sequence[int],
    own: torch.Tensor,
    last_shapes: dict[str, torch.Size],
) -> Steps[torch.Tensor]:
    """Send a contiguous tensor to targets; concatenate the sources' tensors in source order.

    ``last_shapes`` holds the last tensor's shape by name: a repeated shape gets a channel.
    """
    name, shape = op.key.name, own.shape
    repeated, last_shapes[name] = last_shapes.get(name) == shape, shape
    exact = None
    if repeated and ChunkLayout.of(tuple(shape), own.dtype).num_chunks == 1:
        exact = replace(form, shape=tuple(shape))
    exchange, request = op.ragged_exchange(form, exact, sources, targets)
    for peer in targets:
        if peer not in exchange.targets:
            op.send(request, peer, own)
    rows = yield from _gather_rows(exchange, own)
    yield request.sent()
    return rows


def _gather_rows(exchange: ChunkedExchange, own: torch.Tensor) -> Steps[torch.Tensor]:
    """Publish a tensor to the readers of its ring; concatenate the tensors of all sources."""
    while not exchange.for_chunk(0).done():
        yield exchange
    exchange.send_chunk(0, own.view(-1), 1.0, None)
    parts = []
    for source in exchange.sources:
        while not source.for_chunk(0).done():
            yield source
        if source.left:
            continue
        message = None if source.receive is None else source.receive.tensor
        parts.append(source.take().view(-1, *own.shape[1:]) if message is None else message)
    rows = _concatenate([own[:0], *parts])
    for source in exchange.sources:
        source.release()
    return rows


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    with normal_mode():
        return torch.cat(list(parts))


def find_gather_path(
    tensor: torch.Tensor | None = None,
    *more: object,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    check: bool = False,
    **unknown: object,
) -> tuple[NeighborAverageFastPath, WeightRow, torch.Tensor, torch.Tensor | None] | None:
    """Return the fast path of this name, dtype and shape with its arguments, or None."""
    if more or unknown:
        return None  # as the engine's path will report
    if src_ranks is not None or dst_ranks is not None or check or transforming() is not None:
        return None
    if not isinstance(tensor, torch.Tensor) or (round is not None and type(round) is not int):
        return None
    if not has_plain_memory(tensor) or (round is not None and round < 0):
        return None
    if name is not None and type(name) is not str:
        return None  # as the engine's path will report
    context = current()
    path: NeighborAverageFastPath | None = context.engine.fast_paths.get(
        (_VERB, name, tensor.dtype, tensor.shape)
    )
    if path is None:
        return None
    number = context.engine.use_count(name or f"{_VERB}.noname") if round is None else round
    return path, path.weight_row(context.topologies, number), tensor, None


def register_gather_path(context: Context, given: str | None, name: str, own: torch.Tensor) -> None:
    """Register a fast path for tensors like this one if its name has a persistent channel."""
    key = _VERB, given, own.dtype, own.shape
    fast_paths = context.engine.fast_paths
    if key in fast_paths or context.tracer is not None:
        return
    channel = context.engine.matcher.channels.get(name, signature_of(_VERB, own))
    if channel is not None:
        fast_paths[key] = GatherFastPath(context, channel)
