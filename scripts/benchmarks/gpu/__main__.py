"""``gpu``: averages of tensors on a GPU over each transport, beside the limit of its copies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.device import gpus
from benchmarks.gpu.rate_floors import below_floors
from benchmarks.gpu.verb_tables import COPY, SLOWER
from benchmarks.json_tables import JsonTable
from benchmarks.standalone_command import BenchFigures, BenchOptions, command
from benchmarks.subprocess_runs import RunFailedError, on_this_machine, run_for_json
from benchmarks.tables import Rival, TimingRow, TimingTable

__all__ = ["advice", "main"]

TRANSPORT_NAMES = ("cuda_ipc", "cuda_staged", "mpi_cuda", "nccl")
_NO_GPU = 2


def _runs(
    options: BenchOptions, names: Sequence[str], *, pretend: bool
) -> Iterator[tuple[int, str]]:
    """Numbers of ranks and transports, the cheapest first."""
    for ranks in (2,) if options.quick or pretend else (2, 4):
        for transport in ("cuda_staged",) if pretend else names or TRANSPORT_NAMES:
            yield ranks, transport


def _measured(
    ranks: int,
    transport: str,
    options: BenchOptions,
    advance: Callable[[str], None],
    *,
    pretend: bool,
) -> dict[str, Any]:
    """Measure one transport in a run of its own."""
    words = ["--transport", transport]
    words += ["--rounds", str(options.rounds or (2 if pretend else 5 if options.quick else 30))]
    words += ["--quick"] * options.quick + ["--stand-in"] * pretend
    environ = {} if pretend else {"ASYNCDDP_DEVICE_TRANSPORTS": transport}
    try:
        return run_for_json(on_this_machine(ranks, "gpu.gpu_rank", *words), advance, environ)
    except RunFailedError as problem:
        return {"missing": [f"{transport}, {ranks} ranks, was not measured: {problem}"]}


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


def _drawn(path: Path, rows: Sequence[TimingRow], caption: str) -> None:
    """A panel for each number of ranks: time over size by each transport, and the limits."""
    tables: dict[str, str] = {}
    moved: dict[tuple[str, str, int], TimingRow] = {}
    for row in rows:
        transport, _, ranks = row.table.rpartition("_")
        if transport in TRANSPORT_NAMES and row.rival in (transport, COPY, SLOWER):
            key = f"mixing_{ranks}"
            moved[key, row.rival, row.nbytes] = TimingRow(
                key, row.rival, row.nbytes, row.calls, row.seconds
            )
            tables.setdefault(key, f"neighbor_allreduce on a GPU, {ranks} ranks")
    found = list(moved.values())
    drawn = [
        TimingTable(
            key,
            title,
            sorted({row.nbytes for row in found if row.table == key}),
            [Rival(name, _not_callable) for name in (*TRANSPORT_NAMES, COPY, SLOWER)],
        )
        for key, title in tables.items()
    ]
    if drawn:
        from benchmarks.table_plot import save_plot  # matplotlib may be missing where nobody draws

        save_plot(path, drawn, found, caption)


def _not_callable(nbytes: int) -> Any:
    """Stand in for the call of a rival that is only drawn."""
    raise NotImplementedError


def figures(
    options: BenchOptions, advance: Callable[[str], None], names: Sequence[str], *, pretend: bool
) -> BenchFigures:
    """Everything that this bench shows."""
    facts: dict[str, Any] = {}
    figure_tables, rows, missing = [], [], []
    for ranks, transport in _runs(options, names, pretend=pretend):
        advance(f"{transport}, {ranks} ranks")
        found = _measured(ranks, transport, options, advance, pretend=pretend)
        facts = facts or found.get("header", {})
        figure_tables += [JsonTable(**one).opened() for one in found.get("sheets", ())]
        rows += [
            TimingRow(**{**one, "seconds": tuple(one["seconds"])}) for one in found.get("rows", ())
        ]
        missing += found["missing"]
    if not figure_tables:
        raise RunFailedError("\n".join(missing))
    caption = str(facts.get("gpu", ""))
    return BenchFigures(
        facts,
        figure_tables,
        lambda path: _drawn(path, rows, caption),
        rows,
        [*advice(rows), *missing],
        [] if pretend else below_floors(rows),
    )


def _made(names: Sequence[str], *, pretend: bool) -> click.Command:
    return command(
        "gpu", lambda options, advance: figures(options, advance, names, pretend=pretend)
    )


@click.command("gpu", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.option("--stand-in", "pretend", is_flag=True)
@click.option("--transport", "names", multiple=True, type=click.Choice(TRANSPORT_NAMES))
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def main(pretend: bool, names: tuple[str, ...], rest: tuple[str, ...]) -> None:
    """Measure where there is a GPU, all transports or some; ``--stand-in`` runs on the host."""
    if not pretend and gpus() == 0:
        click.echo(
            "bench: gpu needs a GPU that torch can use, and torch sees none here; "
            "scripts/bench gpu --stand-in runs the same on the host",
            err=True,
        )
        sys.exit(_NO_GPU)
    _made(names, pretend=pretend).main(args=list(rest), prog_name="gpu")


if __name__ == "__main__":
    main()
