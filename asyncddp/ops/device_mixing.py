"""The average with neighbours of a tensor that lies on a device: what comes is mixed there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncddp.engine import Desk, Steps
from asyncddp.memory.allocate import empty_like
from asyncddp.memory.streams import DeviceStreams
from asyncddp.memory.views import dense
from asyncddp.ops.device_combine import combine_on_device
from asyncddp.ops.door import form_of

if TYPE_CHECKING:
    from asyncddp.ops.mixing import Mixing

__all__ = ["exchange_and_mix_on_device"]


def exchange_and_mix_on_device(
    desk: Desk,
    tensor: torch.Tensor,
    mixing: Mixing,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    streams: DeviceStreams,
) -> Steps[torch.Tensor]:
    """Send a tensor, mix the neighbours' with it, and give the weighted sum.

    Where the wire lets ranks read each other's memory nothing is copied, or once where the result
    replaces the tensor: neighbours then read a copy. Elsewhere tensors are received first.

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
    into = out.detach() if out is not None and _writable(out, own) else empty_like(own)
    in_place = into.data_ptr() == own.data_ptr()
    form = form_of(desk.verb, own)
    rows = mixing.rows() if desk.check else None
    targets = mixing.dst_weights
    posting = desk.exchange(form, mixing.sources, targets, streams, borrows=True, rows=rows)
    desk.show(posting, mixing.dst_weights, own, lasting=not in_place)
    for peer in mixing.sources:
        yield posting.arrivals[peer]
    if in_place:
        yield posting.freed()
    others = [posting.arrivals[peer].take() for peer in mixing.sources]
    combine_on_device(mixing, dtype, own, others, into)
    others.clear()
    for peer in mixing.sources:
        posting.arrivals[peer].release()
    yield posting.sent()  # peers have queued what reads ours
    return out if out is not None and into.data_ptr() == out.data_ptr() else into


def _writable(out: torch.Tensor, own: torch.Tensor) -> bool:
    alike = (out.device, out.dtype, out.shape) == (own.device, own.dtype, own.shape)
    if not alike or not out.is_contiguous():
        return False
    same = out.data_ptr() == own.data_ptr()
    return same or out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
