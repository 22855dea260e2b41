"""``gpu``: averages of tensors on a GPU over each transport, beside the limit of its copies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.device import gpus
from benchmarks.gpu.rate_floors import below_floors
from benchmarks.gpu.verb_tables import COPY, SLOWER
from benchmarks.ranks import Advance, RunFailedError, run_on_ranks
from benchmarks.report import GPU_TRANSPORTS, BenchFigures, BenchOptions
from benchmarks.tables import FigureRow, FigureTable, Rival, TimingRow, TimingTable

_NO_GPU = 2


def advice(rows: Sequence[TimingRow]) -> list[str]:
    """Which size of pieces was the fastest at each size of tensor, in sentences.

    Args:
        rows: Of all tables; those of pieces count.
    """
    told = []
    pieces = [row for row in rows if row.table.startswith("pieces_")]
    for table, nbytes in sorted({(row.table, row.nbytes) for row in pieces}):
        rivals = [row for row in pieces if (row.table, row.nbytes) == (table, nbytes)]
        best = min(rivals, key=lambda row: row.median)
        usual = next(row for row in rivals if row.rival == "4 MB")
        gain = usual.median / best.median - 1
        told.append(
            f"{table.removeprefix('pieces_')} ranks, {nbytes / 2**20:g} MB: pieces of {best.rival} "
            f"are the fastest, {gain:.0%} faster than those of 4 MB."
        )
    return told


def _draw(path: Path, rows: Sequence[TimingRow], caption: str) -> None:
    """A panel for each number of ranks: time over size by each transport, and the limits."""
    from benchmarks.plots import save_plot  # matplotlib may be missing where nobody draws

    found: dict[tuple[str, str, int], TimingRow] = {}
    for row in rows:
        transport, _, ranks = row.table.rpartition("_")
        if transport in GPU_TRANSPORTS and row.rival in (transport, COPY, SLOWER):
            found[ranks, row.rival, row.nbytes] = replace(row, table=ranks)
    rivals = [Rival(name, _not_callable) for name in (*GPU_TRANSPORTS, COPY, SLOWER)]
    tables = [
        TimingTable(
            ranks,
            f"neighbor_allreduce on a GPU, {ranks} ranks",
            sorted({row.nbytes for row in found.values() if row.table == ranks}),
            rivals,
        )
        for ranks in dict.fromkeys(row.table for row in found.values())
    ]
    if tables:
        save_plot(path, tables, list(found.values()), caption)


def _not_callable(nbytes: int) -> Any:
    """Stand in for the call of a rival that is only drawn."""
    raise NotImplementedError


def refuse(options: BenchOptions) -> None:
    """End the command with a sentence where there is no GPU, and none is pretended."""
    if not options.pretend and gpus() == 0:
        click.echo(
            "bench: gpu needs a GPU that torch can use, and torch sees none here; "
            "scripts/bench gpu --stand-in runs the same on the host",
            err=True,
        )
        sys.exit(_NO_GPU)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows: a run for each transport and number of ranks.

    Raises:
        RunFailedError: Nothing could be measured.
    """
    quick, pretend = options.quick, options.pretend
    rounds = options.rounds or (2 if pretend else 5 if quick else 30)
    transports = ("cuda_staged",) if pretend else options.transports or GPU_TRANSPORTS
    facts: dict[str, Any] = {}
    tables, rows, missing = [], [], []
    for ranks, transport in product((2,) if quick or pretend else (2, 4), transports):
        advance(f"{transport}, {ranks} ranks")
        given = {"transport": transport, "rounds": rounds, "quick": quick, "pretend": pretend}
        environ = {} if pretend else {"ASYNCDDP_DEVICE_TRANSPORTS": transport}
        try:
            found = run_on_ranks(ranks, "gpu.gpu_rank:measure", given, advance, environ)
        except RunFailedError as problem:
            missing.append(f"{transport}, {ranks} ranks, was not measured: {problem}")
            continue
        facts = facts or found["header"]
        for table in found["tables"]:
            table["lines"] = [FigureRow(**line) for line in table["lines"]]
            tables.append(FigureTable(**table))
        rows += [TimingRow(**row) for row in found["rows"]]
        missing += found["missing"]
    if not tables:
        raise RunFailedError("\n".join(missing))
    caption = str(facts.get("gpu", ""))
    return BenchFigures(
        facts,
        tables,
        lambda path: _draw(path, rows, caption),
        rows,
        [*advice(rows), *missing],
        [] if pretend else below_floors(rows),
    )
