"""``python -m benchmarks NAME…``: what ``scripts/bench`` runs, on every rank or in one process."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from benchmarks.harness import measure
from benchmarks.ranks import RunFailedError
from benchmarks.report import GPU_TRANSPORTS, BenchFigures, BenchOptions, Report, progress_line
from benchmarks.tables import TimingTable, size_text

TOGETHER = ("ops", "windows", "step", "timeline", "torch-distributed")
"""Benches that share a run: each has a module with a function ``tables``."""
APART = {
    **{f"network-{part}": f"network.{part}.bench" for part in ("steps", "methods", "cost")},
    "network-gpt": "network.gpt",
    "one-to-n": "one_to_n.bench",
    **{name: f"{name}.bench" for name in ("scale", "methods", "gpu", "elastic")},
    **{name: name for name in ("sharded", "memory", "lightning", "compression")},
}
"""Benches that start their own ranks: each has a module with a function ``figures``.

A function ``refuse`` beside it ends the command where the bench cannot run at all.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, required=True, type=click.Choice([*TOGETHER, *APART]))
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--quick", is_flag=True, help="Little of everything: seconds.")
@click.option("--rounds", type=click.IntRange(min=2), default=None)
@click.option("--stand-in", "pretend", is_flag=True, help="Of gpu: the same on the host.")
@click.option("--with-torchft", is_flag=True, help="Of elastic and sharded: torchft, too.")
@click.option("--transport", "transports", multiple=True, type=click.Choice(GPU_TRANSPORTS))
def main(
    names: Sequence[str], json_file: Path | None, plot_file: Path | None, **options: Any
) -> None:
    """Measure benches that share this run's ranks, or one that starts its own."""
    if set(names) <= set(TOGETHER):
        measure_together(names, BenchOptions(**options), json_file, plot_file)
    elif len(names) > 1:
        raise click.UsageError(f"these do not share a run: {', '.join(names)}")
    else:
        measure_apart(names[0], BenchOptions(**options), json_file, plot_file)


def measure_together(
    names: Sequence[str], options: BenchOptions, json_file: Path | None, plot_file: Path | None
) -> None:
    """Measure the named benches on the ranks that are running; rank 0 reports."""
    import torch

    import asyncddp as bf
    from benchmarks import baselines
    from benchmarks.machine_info import header

    bf.init()
    world = baselines.join()
    quick, rounds = options.quick, options.rounds or (5 if options.quick else 30)
    facts = {**header(world), "rounds": rounds}
    if quick:
        facts["quick"] = "small sizes, few rounds: shows that it runs, and measures nothing"
    report, measured = Report(facts, quiet=world.rank != 0), []
    for name in names:
        bench = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
        tables: Sequence[TimingTable] = bench.tables(world, quick=quick)
        for table in tables:
            with progress_line(table.title, len(table.sizes), shows=world.rank == 0) as advance:
                rows, missing = measure(
                    world,
                    table,
                    rounds=rounds,
                    sample=0.0002 if quick else 0.005,
                    advance=lambda nbytes: advance(f"{size_text(nbytes)} done"),
                )
            report.add_timings(table, rows, missing)
            measured.append(table)
    report.end(json_file)
    if world.rank == 0 and plot_file is not None and report.rows:
        from benchmarks.plots import save_plot

        save_plot(plot_file, measured, report.rows, f"{facts['processor']}, {world.size} ranks")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure_apart(
    name: str, options: BenchOptions, json_file: Path | None, plot_file: Path | None
) -> None:
    """Measure a bench that starts its own ranks.

    Raises:
        ClickException: A run failed, or a figure cannot be right.
    """
    # by way of every ``finally``, so that runs and hosts are taken down
    signal.signal(signal.SIGTERM, _terminated)
    bench = importlib.import_module(f"benchmarks.{APART[name]}")
    if hasattr(bench, "refuse"):
        bench.refuse(options)
    try:
        with progress_line(name, None, shows=True) as advance:
            found = bench.figures(options, advance)
    except RunFailedError as problem:
        raise click.ClickException(str(problem)) from problem
    show(found, json_file, plot_file)


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def show(found: BenchFigures, json_file: Path | None, plot_file: Path | None) -> None:
    """Report what a bench has found.

    Raises:
        ClickException: A figure cannot be right; it comes after the report.
    """
    report = Report(found.facts, rows=[*found.rows])
    for table in found.tables:
        report.add_figures(table)
    report.say(*found.missing)
    report.end(json_file)
    if plot_file is not None:
        found.draw(plot_file)
    if found.failures:
        raise click.ClickException("\n".join(found.failures))


if __name__ == "__main__":
    main(prog_name="scripts/bench")
