"""Implementations of the weighted sum on a device, timed beside each other.

The bytes that have to move are those of all tensors read once, and of one written; the limit is the
time in which a copy on the device moves as many.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple, cast

import torch

from asyncddp.kernels.device_weighted_sum import TritonWeightedSum
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.tensors.dtypes import DTYPES
from benchmarks.tables import FigureRow, FigureTable, size_text, time_text

_CHUNK = 1 << 20  # elements of a piece for torch's foreach
_logger = logging.getLogger("asyncddp")
Work = Callable[[], object]


class WeightedSumTiming(NamedTuple):
    """Timing of one implementation of the weighted sum.

    Attributes:
        way: One of :data:`WAYS`.
        dtype: Of the tensors.
        neighbours: How many tensors are mixed with the own one.
        nbytes: Of each tensor.
        seconds: Median; None where it cannot be done that way here.
        enqueue: Median of what the calling thread spends on it.
        copies: Times that of a copy on the device which moves as many bytes.
    """

    way: str
    dtype: torch.dtype
    neighbours: int
    nbytes: int
    seconds: float | None
    enqueue: float | None
    copies: float | None


class _Case(NamedTuple):
    """Tensors to average, with their weights."""

    mixing: WeightRow
    own: torch.Tensor
    others: list[torch.Tensor]
    out: torch.Tensor

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of the sum."""
        return DTYPES[self.own.dtype].accumulate


def _triton_sum(case: _Case) -> Work:
    kernel, wide = TritonWeightedSum(case.own.device.type), case.accumulate

    def work() -> None:
        """One pass for all, by Triton."""
        if not kernel.weighted_sum(case.mixing, wide, case.own, case.others, case.out):
            raise RuntimeError("the kernel cannot be had here")

    return work


def _passes(case: _Case) -> Work:
    return partial(case.mixing.weighted_sum_in, case.accumulate, case.own, case.others, case.out)


def _foreach(case: _Case) -> Work:
    mixing, own, others, out = case
    wide = case.accumulate
    pieces = [list(torch.split(other, _CHUNK)) for other in others]

    def work() -> None:
        """A pass for each neighbour, whose pieces are started together."""
        total = out.copy_(own) if own.dtype == wide else own.to(wide)
        parts = list(torch.split(total, _CHUNK))
        torch._foreach_mul_(parts, mixing.self_weight)
        for peer, piece in zip(mixing.sources, pieces, strict=True):
            same = piece if own.dtype == wide else [one.to(wide) for one in piece]
            torch._foreach_add_(parts, same, alpha=mixing.src_weights[peer])
        if total is not out:
            out.copy_(total)

    return work


WAYS = {"one pass, by Triton": _triton_sum, "passes of torch": _passes, "torch._foreach": _foreach}
"""Ways to mix."""


def measure_weighted_sums(
    device: torch.device,
    nbytes: Sequence[int],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    neighbours: Sequence[int] = (2, 4, 8),
    repeats: int = 20,
) -> Iterator[WeightedSumTiming]:
    """Measure each way for each size, dtype and number of neighbours; check that they agree.

    Args:
        device: Where the tensors lie.
        nbytes: Sizes of a tensor.
        dtypes: Of the tensors.
        neighbours: How many of them are mixed with the own one.
        repeats: Calls that are timed, after those that warm up.

    Yields:
        In the order of the arguments, the ways within.

    Raises:
        AssertionError: Two ways differ by more than rounding.
    """
    for size, dtype, count in product(nbytes, dtypes, neighbours):
        drawn = torch.Generator(device).manual_seed(count)
        length = max(1, size // dtype.itemsize)
        own, *others = (
            torch.randn(length, generator=drawn, device=device).to(dtype) for _ in range(1 + count)
        )
        mixing = WeightRow(0.4, {k: 1.0 / (k + 2) for k in range(count)}, {})
        case, limit = _Case(mixing, own, others, torch.empty_like(own)), torch.empty_like(own)
        copy = _seconds(device, partial(limit.copy_, own), repeats)[0] * (count + 2) / 2
        expected: torch.Tensor | None = None
        for way, prepare in WAYS.items():
            try:
                with _without_warnings():
                    found = _seconds(device, prepare(case), repeats)
            except RuntimeError:
                yield WeightedSumTiming(way, dtype, count, size, None, None, None)
                continue
            expected = case.out.clone() if expected is None else expected
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(case.out, expected, rtol=2 * unit, atol=8 * unit, msg=way)
            yield WeightedSumTiming(way, dtype, count, size, *found, found[0] / copy)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings of unavailable implementations, which the table shows anyway."""
    before = _logger.level
    _logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _logger.setLevel(before)


def _seconds(device: torch.device, work: Work, repeats: int) -> tuple[float, float]:
    """Medians of how long a call takes on the device, and of how long it keeps its caller."""
    for _ in range(3):
        work()
    taken, called = [], []
    for _ in range(repeats):
        begin, end = _clock(device), _clock(device)
        start = time.perf_counter()
        begin.record()
        work()
        end.record()
        called.append(time.perf_counter() - start)
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken), median(called)


class _HostClock:
    """Timer with a CUDA event's methods, by the host's clock."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostClock) -> float:
        return 1e3 * (end._at - self._at)


def _clock(device: torch.device) -> _HostClock:
    """Make a timer of the device's kind."""
    if device.type != "cuda":
        return _HostClock()
    return cast("_HostClock", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


_COLUMNS = ("way", "dtype", "neighbours", "tensor", "a call", "enqueue", "÷ copy of as many bytes")


def weighted_sum_table(
    device: torch.device, sizes: Sequence[int], neighbours: Sequence[int], repeats: int
) -> FigureTable:
    """Measure all ways on this rank's device, while nobody else uses it.

    Args:
        device: This rank's.
        sizes: Of a tensor, in bytes.
        neighbours: How many tensors are mixed with the own one.
        repeats: Calls that are timed.

    Raises:
        AssertionError: Two ways differ by more than rounding.
    """
    figures = measure_weighted_sums(device, sizes, neighbours=neighbours, repeats=repeats)
    return FigureTable(
        "ways",
        "forming the average of tensors that are there, one rank alone",
        _COLUMNS,
        [FigureRow((*_cells(figure),)) for figure in figures],
        "The copy moves as many bytes as are read and written once each: it is the limit.",
    )


def _cells(figure: WeightedSumTiming) -> list[str]:
    start = [figure.way, str(figure.dtype).removeprefix("torch."), str(figure.neighbours)]
    start.append(size_text(figure.nbytes))
    if figure.seconds is None or figure.enqueue is None or figure.copies is None:
        return [*start, "cannot be had here", "", ""]
    return [*start, time_text(figure.seconds), time_text(figure.enqueue), f"{figure.copies:.2f}"]
