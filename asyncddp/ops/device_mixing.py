"""The average with neighbours of a tensor that lies on a device: what comes is mixed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from asyncddp.engine import Desk, Steps
from asyncddp.memory.dtypes import DTYPES, Kind
from asyncddp.memory.streams import DeviceStreams
from asyncddp.memory.views import dense
from asyncddp.ops.door import form_of

if TYPE_CHECKING:
    from asyncddp.ops.mixing import Mixing

__all__ = ["combine_on_device", "exchange_and_mix_on_device"]


def exchange_and_mix_on_device(
    desk: Desk,
    tensor: torch.Tensor,
    mixing: Mixing,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    streams: DeviceStreams,
) -> Steps[torch.Tensor]:
    """Send a tensor, receive the neighbours' onto the device, and give the weighted sum.

    Args:
        desk: Of the verb.
        tensor: On the device.
        mixing: The weights.
        dtype: In which sums are formed.
        out: Where the result may be written.
        streams: Of the device.

    Returns:
        The sum on the device, in the tensor's dtype: in ``out`` where that is possible.
    """
    own = dense(tensor)
    form = form_of(desk.verb, own)
    posting = desk.exchange(form, mixing.sources, mixing.dst_weights, streams)
    for peer, factor in sorted(mixing.dst_weights.items()):
        desk.send(posting, peer, own if factor == 1.0 else own * factor)
    others = []
    for peer in mixing.sources:
        yield posting.arrivals[peer]
        others.append(posting.arrivals[peer].take())
    yield posting.sent()  # what was read has left, so that it may be written
    into = out.detach() if out is not None and _writable(out, own) else torch.empty_like(own)
    combine_on_device(mixing, dtype, own, others, into)
    return out if out is not None and into.data_ptr() == out.data_ptr() else into


def _writable(out: torch.Tensor, own: torch.Tensor) -> bool:
    alike = (out.device, out.dtype, out.shape) == (own.device, own.dtype, own.shape)
    if not alike or not out.is_contiguous():
        return False
    same = out.data_ptr() == own.data_ptr()
    return same or out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()


def combine_on_device(
    mixing: Mixing,
    dtype: torch.dtype,
    own: torch.Tensor,
    others: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    r"""Form :math:`w_{ii} x_i + \sum_j w_{ij} x_j` in as few passes over memory as torch has.

    One neighbour whose weight and the own one add up to 1 takes one pass, halves included, whose
    ``lerp`` computes in float32 on a device. More neighbours take one pass each; halves are then
    accumulated in float32 and rounded once. Weights stay float64 on the host until the kernel.

    Args:
        mixing: The weights.
        dtype: In which sums are formed.
        own: :math:`x_i`, contiguous.
        others: The neighbours' tensors, in the order of ``mixing.sources``.
        out: Where the sum goes; may be ``own``.

    Example:
        >>> from asyncddp.ops.mixing import Mixing
        >>> x, out = torch.ones(2, dtype=torch.bfloat16), torch.empty(2, dtype=torch.bfloat16)
        >>> combine_on_device(Mixing(0.5, {1: 0.25, 2: 0.25}, {}), torch.float32, x, [x, x], out)
        >>> out.tolist()
        [1.0, 1.0]
    """
    narrow = own.dtype != dtype
    if not narrow or (mixing.between is not None and own.is_cuda and own.is_floating_point()):
        mixing.combine(own, others, out)
        return
    total, mean = own.to(dtype), mixing.uniform and bool(others)
    if not mean:
        total.mul_(mixing.self_weight)
    for peer, other in zip(mixing.sources, others, strict=True):
        total.add_(other, alpha=1.0 if mean else mixing.src_weights[peer])
    if mean:
        total.div_(len(others) + 1)
    out.copy_(total.round_() if DTYPES[out.dtype].kind is Kind.INTEGER else total)
