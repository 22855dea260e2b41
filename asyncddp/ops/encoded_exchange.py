"""Averages of compressed tensors: with neighbours, or over all ranks of a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeAlias

import torch
from msgspec.structs import replace

from asyncddp.compression import Compressor, compressor_for
from asyncddp.compression.compressor import require_compressible
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ExchangeSignature, PeerExchanges, Steps
from asyncddp.errors import ArgumentError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.group_exchange import (
    exchange_all_gather,
    exchange_all_to_all,
    exchange_tensors,
)
from asyncddp.ops.validation import check_tensor, signature_of
from asyncddp.tensors.allocation import empty, zeros
from asyncddp.tensors.byte_views import dense, on_host
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.tensors.means import add, split_divisor

Compression: TypeAlias = str | Compressor | TensorCompressor | None
"""A compressor's name, a compressor, or one with a tensor's state; None means uncompressed."""


def checked_compression(
    verb: str,
    tensor: torch.Tensor,
    compression: Compression,
    parts: int = 1,
    *,
    filled_up: bool = True,
) -> Compression:
    """Check a verb's compression argument against its tensor; return a compressor or None.

    The tensor is sent in ``parts`` parts. With ``filled_up`` the last part is padded to the size of
    the others; otherwise some parts have one element less.

    Raises:
        ArgumentError: It is none, needs a state that the verb cannot keep, or cannot encode it.
        DtypeError: The tensor's dtype cannot be compressed.
    """
    if compression is None:
        return None
    check_tensor(verb, tensor)
    require_compressible(verb, tensor)
    checked = compression
    if isinstance(compression, TensorCompressor):
        compressor = compression.compressor
    else:
        checked = compressor = compressor_for(verb, compression)
        if compressor.needs_state:
            raise ArgumentError(
                f"{verb}: argument compression: {compressor!r} remembers what it owes from call "
                "to call; give a TensorCompressor of it, made once for this tensor and used in "
                "each call"
            )
    if numel := tensor.numel():
        try:
            least = -(-numel // parts) if filled_up else max(1, numel // parts)
            compressor.encoded_size(least, tensor.dtype)
        except ArgumentError as error:
            raise ArgumentError(f"{verb}: argument compression: {error}") from None
    return checked


def bound_to(op: PeerExchanges, compression: Compression) -> TensorCompressor:
    """Return a call's tensor compressor; by default one seeded by rank, name and use."""
    if isinstance(compression, TensorCompressor):
        return compression
    assert isinstance(compression, Compressor)
    return TensorCompressor(compression, zlib.crc32(f"{op.rank} {op.key}".encode()))


def encoded_signature(verb: str, tensor: torch.Tensor, encoded: torch.Tensor) -> ExchangeSignature:
    """Return the signature of encoded messages; its verb names the original dtype and shape."""
    plain = signature_of(verb, tensor)
    dtype = str(encoded.dtype).removeprefix("torch.")
    title = f"{verb} of {plain.dtype} {plain.shape}"
    return replace(plain, verb=title, dtype=dtype, shape=tuple(encoded.shape))


def average_encoded(
    op: PeerExchanges,
    tensor: torch.Tensor,
    row: WeightRow,
    dtype: torch.dtype,
    codec: TensorCompressor,
) -> Steps[torch.Tensor]:
    r"""Send a compressed tensor to the neighbours; return the weighted sum in ``dtype``.

    .. math:: y_i = w_{ii} x_i + \sum_j w_{ij} Q(d_{ji} x_j)
    """
    own = on_host(tensor) if streams_of(tensor) is None else dense(tensor)
    flat = own.reshape(1, -1)
    total = flat.to(dtype, copy=True).mul_(row.self_weight)
    messages = {
        factor: codec.encode(flat if factor == 1.0 else flat * factor)
        for factor in sorted({*row.dst_weights.values()} or {1.0})
    }
    title = f"{op.verb}(compression={codec.compressor!r})"
    form = encoded_signature(title, own, next(iter(messages.values())))
    parts = {peer: messages[factor] for peer, factor in row.dst_weights.items()}
    received = yield from exchange_tensors(op, form, row.sources, parts, own)
    for peer in row.sources:
        if peer in received:
            codec.decode_add(received[peer], total, row.src_weights[peer], own.dtype)
        else:
            total.add_(flat, alpha=row.src_weights[peer])
    return total.view(own.shape)


def sum_encoded_over_group(
    op: PeerExchanges,
    group: Sequence[int],
    tensor: torch.Tensor,
    codec: TensorCompressor | None,
    title: str,
    divisor: float,
) -> Steps[torch.Tensor]:
    r"""Sum compressed tensors over a group by scatter and gather; divide by ``divisor``.

    Each rank receives one of the group's equally long parts from all ranks, sums it, and sends the
    encoded quotient to all:

    .. math:: y_c = Q_2\Big(\frac1d \sum_j Q_1(x_{j,c})\Big), \qquad c = 1, \dots, n

    so that all ranks decode the same bytes. Without a compressor parts are sent uncompressed.

    Args:
        op: The operation's exchanges.
        group: Ranks that take part, in the same order on all.
        tensor: This rank's tensor.
        codec: Compressor of the messages; None sends them uncompressed.
        title: Verb and arguments that must be equal on all ranks of the group.
        divisor: Number that divides the sum.
    """
    tensor = on_host(tensor) if streams_of(tensor) is None else dense(tensor)
    parts = _equal_parts(tensor, len(group))
    title = title if codec is None else f"{title} with {codec.compressor!r}"
    wide = DTYPES[tensor.dtype].accumulate
    rows = torch.split(parts if codec is None else codec.encode(parts), 1)
    form = encoded_signature(title, tensor, rows[0])
    received = yield from exchange_all_to_all(op, group, form, rows)
    total, (scale, rest) = zeros((1, parts.shape[1]), wide, tensor.device), split_divisor(divisor)
    for message in received:
        if codec is None:
            add(total, message, scale)
        else:
            codec.decode_add(message, total, scale, tensor.dtype)
    if rest != 1:
        total.div_(rest)
    mean = total.to(tensor.dtype)
    row = mean if codec is None else codec.second_message.encode(mean)
    form = encoded_signature(title, tensor, row)
    gathered = torch.cat((yield from exchange_all_gather(op, group, form, row)))
    if codec is not None:
        whole = empty(parts.shape, tensor.dtype, tensor.device)
        gathered = codec.second_message.decode(gathered, whole)
    return gathered.view(-1)[: tensor.numel()].view(tensor.shape)


def _equal_parts(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return a tensor's elements as ``count`` rows; the last row is padded with zeros."""
    numel, width = tensor.numel(), -(-tensor.numel() // count)
    if numel == count * width:
        return tensor.reshape(count, width)
    rows = zeros((count, width), tensor.dtype, tensor.device)
    rows.view(-1)[:numel].copy_(tensor.reshape(-1))
    return rows
