"""The weighted sum of tensors that lie on a device, in as few passes over memory as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from asyncddp.memory.dtypes import DTYPES, Kind

if TYPE_CHECKING:
    from asyncddp.ops.mixing import Mixing

__all__ = ["combine_on_device"]


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
