"""Triton kernel that computes the weighted sum of many tensors in one pass over memory.

Triton compiles it on first use, once for each dtype and number of tensors, and caches the compiled
code on disk. Triton comes with torch's CUDA wheels for Linux; where it is missing, importing this
module raises an ``ImportError``, and
:func:`~asyncddp.kernels.device_weighted_sum.weighted_sum_on_device` uses torch instead.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from subprocess import SubprocessError

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from asyncddp.tensors.allocation import empty

FAILURES = (
    TritonError, RuntimeError, OSError, SubprocessError, ValueError, TypeError, AttributeError,
    LookupError, AssertionError,
)  # fmt: skip
"""Exceptions of Triton if it cannot compile or launch a kernel, as without a C compiler."""

MAX_OTHERS = 8
"""Maximum number of tensors that one pass adds to the first."""

_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
_launching = threading.Lock()  # Triton compiles in one thread at a time
_BLOCK = 2048  # elements of one program; a power of two
_ALIGNMENT = 16  # bytes: the widest access of a GPU
_MINUS_ZERO = -(1 << 63)
_POINTERS = ("out", "first", *(f"x{k}" for k in range(1, MAX_OTHERS + 1)))
_SCALARS = ("count", *(f"w{k}" for k in range(MAX_OTHERS + 1)), "divisor")


@triton.jit
def _term(x, weight, offsets, inside, wide: tl.constexpr):
    """Load a block of x, and multiply it by its weight in the accumulation dtype."""
    value = tl.load(x + offsets, mask=inside).to(wide)
    return weight.to(tl.float64, bitcast=True).to(wide) * value


@triton.jit
def _sum_block(
    out, first, x1, x2, x3, x4, x5, x6, x7, x8,
    w0, w1, w2, w3, w4, w5, w6, w7, w8, divisor,
    offsets, inside, others: tl.constexpr, divides: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Compute and store one block of the weighted sum."""
    total = _term(first, w0, offsets, inside, wide)
    if others > 0:
        total += _term(x1, w1, offsets, inside, wide)
    if others > 1:
        total += _term(x2, w2, offsets, inside, wide)
    if others > 2:
        total += _term(x3, w3, offsets, inside, wide)
    if others > 3:
        total += _term(x4, w4, offsets, inside, wide)
    if others > 4:
        total += _term(x5, w5, offsets, inside, wide)
    if others > 5:
        total += _term(x6, w6, offsets, inside, wide)
    if others > 6:
        total += _term(x7, w7, offsets, inside, wide)
    if others > 7:
        total += _term(x8, w8, offsets, inside, wide)
    if divides:
        share = divisor.to(tl.float64, bitcast=True).to(wide)
        total = tl.div_rn(total, share) if wide == tl.float32 else total / share
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


def _weighted_sum_kernel(
    out, first, x1, x2, x3, x4, x5, x6, x7, x8,
    count, w0, w1, w2, w3, w4, w5, w6, w7, w8, divisor,
    others: tl.constexpr, divides: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Kernel entry point: accesses full blocks without a mask, the last block with one."""
    start = tl.program_id(0).to(tl.int64) * block
    offsets = start + tl.arange(0, block)
    if start + block <= count:
        _sum_block(out, first, x1, x2, x3, x4, x5, x6, x7, x8, w0, w1, w2, w3, w4, w5, w6, w7, w8,
             divisor, offsets, None, others, divides, wide)  # fmt: skip
    else:
        _sum_block(out, first, x1, x2, x3, x4, x5, x6, x7, x8, w0, w1, w2, w3, w4, w5, w6, w7, w8,
             divisor, offsets, offsets < count, others, divides, wide)  # fmt: skip


_ALIGNED_KERNEL = triton.jit(_weighted_sum_kernel, do_not_specialize=_SCALARS)
_UNALIGNED_KERNEL = triton.jit(_weighted_sum_kernel, do_not_specialize=(*_SCALARS, *_POINTERS))


def weighted_sum(
    own: torch.Tensor,
    others: Sequence[torch.Tensor],
    weights: Sequence[float],
    out: torch.Tensor,
    *,
    divisor: float = 1,
    dtype: torch.dtype = torch.float32,
) -> None:
    r"""Enqueue :math:`y = \frac{1}{d} (w_0 x_0 + \sum_k w_k x_k)` on the current stream.

    Every product and sum is rounded in ``dtype`` (float32 or float64), and the result once more
    where that is wider than the tensors. Up to :data:`MAX_OTHERS` others take one pass; more take
    several, between which the sum stays in ``dtype``. ``own`` is :math:`x_0`, ``out`` may be
    ``own``; all are contiguous floats of one shape and dtype, on the current device.

    Raises:
        Exception: One of :data:`FAILURES`, where Triton cannot do it.

    References:
        Tillet, Kung, and Cox, "Triton: an intermediate language and compiler for tiled neural
        network computations", 2019.
    """
    if not own.numel():
        return
    first, total = own, out
    for start in range(0, max(1, len(others)), MAX_OTHERS):
        some = others[start : start + MAX_OTHERS]
        last = start + MAX_OTHERS >= len(others)
        if last:
            total = out
        elif out.dtype != dtype and total is out:
            total = empty(own.shape, dtype, own.device)
        shares = [1.0 if start else weights[0], *weights[1 + start : 1 + start + MAX_OTHERS]]
        _launch(total, first, some, shares, divisor if last else 1, dtype)
        first = total


def _launch(
    out: torch.Tensor,
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    weights: Sequence[float],
    divisor: float,
    dtype: torch.dtype,
) -> None:
    tensors = (out, first, *others)
    aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
    spare = MAX_OTHERS - len(others)
    with _launching:
        (_ALIGNED_KERNEL if aligned else _UNALIGNED_KERNEL)[-(-first.numel() // _BLOCK),](
            *tensors,
            *[first] * spare,
            first.numel(),
            *map(_bits, weights),
            *[_MINUS_ZERO] * spare,
            _bits(divisor),
            others=len(others),
            divides=divisor != 1,
            wide=_WIDE[dtype],
            block=_BLOCK,
            enable_fp_fusion=True,
        )


def _bits(weight: float) -> int:
    """Reinterpret a 64-bit float as an integer: Triton passes float arguments with 32 bits.

    Triton would pass integers that fit into 32 bits in 32 bits. Such are the bits of zero and of
    numbers below 1e-313; they are replaced by minus zero.
    """
    (bits,) = struct.unpack("=q", struct.pack("=d", weight))
    return bits if bits >> 31 not in (0, -1) else _MINUS_ZERO
