"""Table of weighted sums on a device: one pass by Triton, passes by torch, torch's foreach."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.device import Device
from benchmarks.gpu.weighted_sums import WeightedSumTiming, measure_weighted_sums
from benchmarks.json_tables import JsonTable
from benchmarks.unit_text import size_text, time_text

__all__ = ["weighted_sum_table"]

_COLUMNS = ("way", "dtype", "neighbours", "tensor", "a call", "enqueue", "÷ copy of as many bytes")


def weighted_sum_table(
    device: Device, sizes: Sequence[int], neighbours: Sequence[int], repeats: int
) -> JsonTable:
    """Measure all ways on this rank's device, while nobody else uses it.

    Args:
        device: This rank's.
        sizes: Of a tensor, in bytes.
        neighbours: How many tensors are mixed with the own one.
        repeats: Calls that are timed.

    Raises:
        AssertionError: Two ways differ by more than rounding.
    """
    figures = measure_weighted_sums(device.place, sizes, neighbours=neighbours, repeats=repeats)
    lines = [{"cells": _cells(figure), "aim": None, "met": None} for figure in figures]
    return JsonTable(
        "ways",
        "forming the average of tensors that are there, one rank alone",
        _COLUMNS,
        lines,
        "The copy moves as many bytes as are read and written once each: it is the limit.",
    )


def _cells(figure: WeightedSumTiming) -> list[str]:
    start = [figure.way, str(figure.dtype).removeprefix("torch."), str(figure.neighbours)]
    start.append(size_text(figure.nbytes))
    if figure.seconds is None or figure.enqueue is None or figure.copies is None:
        return [*start, "cannot be had here", "", ""]
    return [
        *start,
        time_text(figure.seconds),
        time_text(figure.enqueue),
        f"{figure.copies:.2f}",
    ]
