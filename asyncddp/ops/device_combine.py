"""The weighted sum of tensors that lie on a device, in as few passes over memory as it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from asyncddp.memory.dtypes import DTYPES, Kind

if TYPE_CHECKING:
    from asyncddp.ops.mixing import Mixing

__all__ = ["Fused", "combine_on_device"]

logger = logging.getLogger("asyncddp")


class Fused:
    """The one pass that Triton makes, for as long as nothing is wrong with it.

    Args:
        device: Type of the devices whose tensors it takes: ``"cuda"``. In tests, and in Triton's
            interpreter, ``"cpu"``.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._usable = True

    def combine(
        self,
        mixing: Mixing,
        dtype: torch.dtype,
        own: torch.Tensor,
        others: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> bool:
        """Form the sum if it can; whether it did. Arguments as of :func:`combine_on_device`."""
        if not self._usable or own.device.type != self._device:
            return False
        tensors = (own, *others, out)
        if not own.is_floating_point() or not all(tensor.is_contiguous() for tensor in tensors):
            return False
        weights = [mixing.self_weight, *(mixing.src_weights[peer] for peer in mixing.sources)]
        divisor = 1
        if mixing.uniform:
            weights, divisor = [1.0] * len(weights), len(weights)
        try:
            from asyncddp.ops import mixing_kernel
        except ImportError as error:
            return self._give_up(error)
        try:
            mixing_kernel.mix(own, others, weights, out, divisor=divisor, dtype=dtype)
        except mixing_kernel.FAILURES as error:
            return self._give_up(error)
        return True

    def _give_up(self, error: Exception) -> bool:
        self._usable = False
        logger.warning(
            "averages on the GPU take one pass over memory for each neighbour, by torch, and not "
            "one for all, by Triton: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return False


_fused = Fused("cuda")


def combine_on_device(
    mixing: Mixing,
    dtype: torch.dtype,
    own: torch.Tensor,
    others: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    r"""Form :math:`w_{ii} x_i + \sum_j w_{ij} x_j` in as few passes over memory as there can be.

    One neighbour whose weight and the own one add up to 1 takes one pass of torch's ``lerp``, which
    computes in float32 for halves on a device. All other sums of floats take one pass of the kernel
    in :mod:`asyncddp.ops.mixing_kernel`, where Triton is there and works; else, and for other
    dtypes, torch makes one pass for each neighbour. Halves are accumulated in float32 and rounded
    once; weights stay float64 until the kernel.

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
    if mixing.between is not None or not others:
        once = not narrow or (own.is_cuda and own.is_floating_point())
    else:
        once = False
    if once:
        mixing.combine(own, others, out)
    elif not _fused.combine(mixing, dtype, own, others, out):
        _combine_by_torch(mixing, dtype, own, others, out)


def _combine_by_torch(
    mixing: Mixing,
    dtype: torch.dtype,
    own: torch.Tensor,
    others: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """A pass for each neighbour, in a wider tensor where sums are formed in a wider dtype."""
    if own.dtype == dtype:
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
