"""``compression``: the time to encode and decode, beside a copy of the same tensor, on one core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from asyncddp.compression import COMPRESSORS, Compressor, ErrorFeedback
from asyncddp.tensors.allocation import empty
from benchmarks.harness import measure
from benchmarks.machine_info import machine_facts
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import (
    KB,
    MB,
    FigureRow,
    FigureTable,
    RankGroup,
    Rival,
    TimingRow,
    TimingTable,
    size_text,
)

_SIZES, _QUICK = (256 * KB, 4 * MB, 64 * MB), (256 * KB,)
_COPY, _ENCODE, _DECODE, _ADD = "copy", "encode", "decode", "decode_add"
_SAMPLE = 0.002  # seconds that a turn lasts at least
_NOTE = (
    "float32, normal random numbers, one chunk. Rates count the tensor's bytes, not of what it "
    "is encoded in; in brackets, the time over that of a copy. All take turns in every round."
)
_MOST_COPIES = {
    **dict.fromkeys(("fp16", "bf16"), (3, 1.5)),
    **dict.fromkeys(("minmax_uint8", "qsgd_int8", "qsgd_int4", "sign"), (6, 3)),
}
"""Aims at the largest size: times of encode and decode over that of a copy."""


class OneRank:
    """The part of a communicator that the harness needs, for one rank."""

    rank, size = 0, 1

    def allgather(self, value: Any) -> list[Any]:
        """Gather from this rank alone."""
        return [value]

    def Barrier(self) -> None:  # noqa: N802 (mpi4py's name)
        """Wait for nobody."""

    def Ibarrier(self) -> OneRank:  # noqa: N802
        """Wait for nobody, later."""
        return self

    def Test(self) -> bool:  # noqa: N802
        """Return True: all have come."""
        return True


def _compressors() -> dict[str, Compressor]:
    alone = {name: kind() for name, kind in COMPRESSORS.items()}
    return {**alone, "sign, error feedback": ErrorFeedback(alone["sign"])}


def _rivals(nbytes: int) -> list[Rival]:
    """The copy, and each compressor's functions on its own bytes: ``function: compressor``."""
    x = empty((1, nbytes // 4), torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    y = empty(x.shape, x.dtype)
    calls: dict[str, partial[Any]] = {f"{_COPY}: {_COPY}": partial(y.copy_, x)}
    for name, q in _compressors().items():
        encoded = empty((1, q.encoded_size(x.shape[1], x.dtype)), torch.uint8)
        state = q.new_state(x) or None
        calls[f"{_ENCODE}: {name}"] = partial(q.encode, x, encoded, seed=1, state=state)
        calls[f"{_DECODE}: {name}"] = partial(q.decode, encoded, y)
        calls[f"{_ADD}: {name}"] = partial(q.decode_add, encoded, y, 0.5)

    def rival(name: str, call: partial[Any]) -> Rival:
        return Rival(name, lambda nbytes: lambda number: call())

    return [rival(name, call) for name, call in calls.items()]


def measure_size(nbytes: int, rounds: int) -> list[TimingRow]:
    """Measure everything on a tensor of one size."""
    table = TimingTable("compression", "", [nbytes], _rivals(nbytes))
    world = RankGroup(OneRank(), None)
    rows, _ = measure(world, table, rounds=rounds, sample=_SAMPLE)
    found = []
    for row in rows:
        what, name = row.rival.split(": ")
        found.append(replace(row, table=what, rival=name))
    return found


def _table(rows: Sequence[TimingRow], nbytes: int, *, judged: bool) -> FigureTable:
    """The table of a size, from its rows."""
    copy, *others = (row for row in rows if row.nbytes == nbytes)
    found = {(row.rival, row.table): row for row in others}
    lines = [FigureRow((_COPY, "32", _rate(copy), "", ""))]
    for name, q in _compressors().items():
        parts = [found[name, what] for what in (_ENCODE, _DECODE, _ADD)]
        encode, decode, _ = ratios = [row.median / copy.median for row in parts]
        told = (f"{_rate(row)} [{ratio:.3g}]" for row, ratio in zip(parts, ratios, strict=True))
        words, met = None, None
        if judged and name in _MOST_COPIES:
            most = _MOST_COPIES[name]
            words = f"encode ≤ {most[0]:g}, decode ≤ {most[1]:g} copies"
            met = encode <= most[0] and decode <= most[1]
        bits = f"{q.bits_per_element(nbytes // 4):.3g}"
        lines.append(FigureRow((name, bits, *told), words, met))
    columns = ("compressor", "bits an element", "encode, GB/s", "decode, GB/s", "decode_add, GB/s")
    title = f"compression of {size_text(nbytes)} on one core"
    return FigureTable(f"compression_{nbytes}", title, columns, lines, _NOTE)


def _rate(row: TimingRow) -> str:
    return f"{row.nbytes / row.median / 1e9:.3g} ±{row.spread:.0%}"


def _bars(rows: Sequence[TimingRow], largest: int) -> Mapping[str, tuple[list[float], str]]:
    """Two bars for every compressor, at the largest size."""
    found = {(row.rival, row.table): row.median for row in rows if row.nbytes == largest}
    copy = found[_COPY, _COPY]
    return {
        what: ([found[name, what] / copy for name in _compressors()], color)
        for what, color in ((_ENCODE, "#D55E00"), (_DECODE, "#0072B2"))
    }


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows."""
    from benchmarks.plots import draw_bars

    facts, threads = machine_facts(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows: list[TimingRow] = []
        sizes = _QUICK if options.quick else _SIZES
        for nbytes in sizes:
            advance(size_text(nbytes))
            rows += measure_size(nbytes, options.rounds or (5 if options.quick else 30))
    finally:
        torch.set_num_threads(threads)
    tables = [_table(rows, nbytes, judged=nbytes == _SIZES[-1]) for nbytes in sizes]
    label = f"time over that of a copy, tensor of {size_text(sizes[-1])}, one core"
    names, bars = list(_compressors()), _bars(rows, sizes[-1])
    return BenchFigures(facts, tables, lambda path: draw_bars(path, names, bars, label), rows)
