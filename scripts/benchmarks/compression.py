"""``compression``: the time to encode and decode, beside a copy of the same tensor, on one core."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from asyncddp.compression import COMPRESSORS, Compressor, ErrorFeedback
from asyncddp.tensors.allocation import empty
from benchmarks.machine_info import machine_facts
from benchmarks.standalone_command import BenchFigures, BenchOptions, command, finished
from benchmarks.tables import FigureRow, FigureTable, TimingRow
from benchmarks.unit_text import size_text

__all__ = ["main", "measure_size"]

_KB, _MB = 1 << 10, 1 << 20
_SIZES, _QUICK = (256 * _KB, 4 * _MB, 64 * _MB), (256 * _KB,)
_COPY, _ENCODE, _DECODE, _ADD = "copy", "encode", "decode", "decode_add"
_SAMPLE = 0.002  # seconds that a turn lasts at least
_NOTE = (
    "float32, normal random numbers, one chunk. Rates count the tensor's bytes, not of what it "
    "is encoded in; in brackets, the time over that of a copy. All take turns in every round."
)


class _MostCopies(NamedTuple):
    """Aims: times over that of a copy, at the largest size."""

    encode: float
    decode: float


_AIMS = {
    **dict.fromkeys(("fp16", "bf16"), _MostCopies(3, 1.5)),
    **dict.fromkeys(("minmax_uint8", "qsgd_int8", "qsgd_int4", "sign"), _MostCopies(6, 3)),
}


@dataclass
class _Turn:
    """Work that is timed: one of a compressor's functions, or a copy.

    Args:
        name: The compressor's.
        what: The function.
        call: The work, once.
    """

    name: str
    what: str
    call: Callable[[], object]
    calls: int = 1

    def __post_init__(self) -> None:
        self.round()  # touches memory
        self.calls = max(1, round(_SAMPLE / min(self.round() for _ in range(3))))

    def round(self) -> float:
        """Seconds for one call, the mean of a round."""
        start = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        return (time.perf_counter() - start) / self.calls


def _compressors() -> dict[str, Compressor]:
    alone = {name: kind() for name, kind in COMPRESSORS.items()}
    return {**alone, "sign, error feedback": ErrorFeedback(alone["sign"])}


def _turns(nbytes: int) -> list[_Turn]:
    """The copy, and each compressor's functions on its own bytes."""
    x = empty((1, nbytes // 4), torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    y = empty(x.shape, x.dtype)
    turns = [_Turn(_COPY, _COPY, lambda: y.copy_(x))]
    for name, q in _compressors().items():
        encoded = empty((1, q.encoded_size(x.shape[1], x.dtype)), torch.uint8)
        state = q.new_state(x) or None
        named = (
            (_ENCODE, partial(q.encode, x, encoded, seed=1, state=state)),
            (_DECODE, partial(q.decode, encoded, y)),
            (_ADD, partial(q.decode_add, encoded, y, 0.5)),
        )
        turns += [_Turn(name, what, call) for what, call in named]
    return turns


def measure_size(nbytes: int, rounds: int) -> list[TimingRow]:
    """Measure everything on a tensor of one size; every second round goes backwards."""
    turns = _turns(nbytes)
    seconds: list[list[float]] = [[] for _ in turns]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = list(zip(turns, seconds, strict=True))
            for turn, taken in order if number % 2 == 0 else reversed(order):
                taken.append(turn.round())
    finally:
        gc.enable()
    return [
        TimingRow(turn.what, turn.name, nbytes, turn.calls, tuple(taken))
        for turn, taken in zip(turns, seconds, strict=True)
    ]


def _table(
    rows: Sequence[TimingRow], nbytes: int, *, judged: bool
) -> tuple[FigureTable, Sequence[FigureRow]]:
    """The table of a size, from its rows."""
    copy, *others = (row for row in rows if row.nbytes == nbytes)
    found = {(row.rival, row.table): row for row in others}
    lines = [FigureRow((_COPY, "32", _rate(copy), "", ""))]
    for name, q in _compressors().items():
        parts = [found[name, what] for what in (_ENCODE, _DECODE, _ADD)]
        bits = f"{q.bits_per_element(nbytes // 4):.3g}"
        cells = (name, bits, *(f"{_rate(row)} [{row.median / copy.median:.3g}]" for row in parts))
        most = _AIMS.get(name) if judged else None
        if most is None:
            lines.append(FigureRow(cells))
            continue
        words = f"encode ≤ {most.encode:g}, decode ≤ {most.decode:g} copies"
        ratios = [row.median / copy.median for row in parts]
        lines.append(FigureRow(cells, words, ratios[0] <= most.encode and ratios[1] <= most.decode))
    columns = ("compressor", "bits an element", "encode, GB/s", "decode, GB/s", "decode_add, GB/s")
    title = f"compression of {size_text(nbytes)} on one core"
    return finished(f"compression_{nbytes}", title, columns, lines, _NOTE)


def _rate(row: TimingRow) -> str:
    return f"{row.nbytes / row.median / 1e9:.3g} ±{row.spread:.0%}"


def draw(path: Path, rows: Sequence[TimingRow]) -> None:
    """Draw two bars for every compressor, at the largest size.

    Raises:
        ValueError: The file name's ending is none that matplotlib can write.
    """
    largest = max(row.nbytes for row in rows)
    found = {(row.rival, row.table): row.median for row in rows if row.nbytes == largest}
    names = list(_compressors())
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.2, 0.8 + 0.35 * len(names)), layout="constrained")
        axes = figure.subplots()
        for shift, what, color in ((-0.2, _ENCODE, "#D55E00"), (0.2, _DECODE, "#0072B2")):
            copies = [found[name, what] / found[_COPY, _COPY] for name in names]
            places = [place + shift for place in range(len(names))]
            axes.barh(places, copies, height=0.4, color=color, label=what)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(f"time over that of a copy, tensor of {size_text(largest)}, one core")
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150, bbox_inches="tight")


def figures(options: BenchOptions, advance: Callable[[str], None]) -> BenchFigures:
    """Everything that this bench shows."""
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
    return BenchFigures(facts, tables, lambda path: draw(path, rows), rows)


main = command("compression", figures)

if __name__ == "__main__":
    main()
