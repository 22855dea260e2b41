"""Weighted sum of device tensors: one fused Triton kernel if possible, else PyTorch operations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from asyncddp.kernels.weight_row import WeightRow
from asyncddp.tensors.means import split_divisor

logger = logging.getLogger("asyncddp")


class TritonWeightedSum:
    """Weighted sum by the Triton kernel, permanently disabled after its first failure.

    It handles tensors of one device type, which is ``"cpu"`` in Triton's interpreter.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._usable = True

    def weighted_sum(
        self,
        row: WeightRow,
        dtype: torch.dtype,
        own: torch.Tensor,
        others: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> bool:
        """Compute the sum by Triton; False if impossible. See :func:`weighted_sum_on_device`."""
        if not self._usable or own.device.type != self._device:
            return False
        tensors = (own, *others, out)
        if not own.is_floating_point() or not all(tensor.is_contiguous() for tensor in tensors):
            return False
        weights = [row.self_weight, *(row.src_weights[peer] for peer in row.sources)]
        scale, divisor = split_divisor(len(weights) if row.is_uniform else None)
        if scale != 1:
            weights = [scale] * len(weights)
        try:
            from asyncddp.kernels import triton_sum
        except ImportError as error:
            return self._give_up(error)
        try:
            triton_sum.weighted_sum(own, others, weights, out, divisor=divisor, dtype=dtype)
        except triton_sum.FAILURES as error:
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


_triton_sum = TritonWeightedSum("cuda")


def weighted_sum_on_device(
    row: WeightRow,
    dtype: torch.dtype,
    own: torch.Tensor,
    others: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    r"""Compute :math:`w_{ii} x_i + \sum_j w_{ij} x_j` in as few passes over memory as possible.

    With one neighbour, and weights that add up to 1, it takes one pass of torch's ``lerp``. All
    other sums of floats take one pass of :mod:`asyncddp.kernels.triton_sum` if Triton works; else,
    and for other dtypes, torch makes one pass per neighbour. Half-precision tensors are accumulated
    in float32 and rounded once. ``others`` is in the order of ``row.sources``; ``out`` may be
    ``own``.
    """
    one_pass = own.dtype == dtype or (own.is_cuda and own.is_floating_point())
    if one_pass and (row.lerp_weight is not None or not others):
        row.weighted_sum(own, others, out)
    elif not _triton_sum.weighted_sum(row, dtype, own, others, out):
        row.weighted_sum_in(dtype, own, others, out)
