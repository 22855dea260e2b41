"""Output of ``asyncddp compare``: table, legend, notes and files."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from asyncddp.cli.console import format_bytes, make_console, make_table, writing

if TYPE_CHECKING:
    from rich.table import Table

    from asyncddp.simulate import MethodComparison, Run, Scenario


def show(found: MethodComparison, title: str, scenario: Scenario) -> None:
    """Print the table with its legend and notes."""
    console = make_console()
    console.print(_table(found, title))
    console.print(_legend(found.runs, scenario), highlight=False)
    for note in _notes(found.runs):
        console.print(note, markup=False, highlight=False)


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    """Yield warnings about runs that diverged or never averaged."""
    for run in runs:
        if not isfinite(run.consensus_distance[-1]):
            yield f"\n{run.method} has diverged: take a smaller --lr."
        elif not run.bytes_sent[-1] and run.rank_steps.shape[1] > 1 and "empty" not in run.method:
            name, interval = run.method.partition(",")[0], max(1, run.steps[-1] // 10)
            yield (
                f"\n{run.method} has sent nothing in {run.steps[-1]} steps: each rank has trained "
                "alone. Take more --steps, or let it average more often: "
                f"{name}:communication_interval={interval}."
            )


def _table(found: MethodComparison, title: str) -> Table:
    from rich.text import Text

    scored = any(run.score[-1] == run.score[-1] for run in found.runs)
    judged = "score" if scored else "error"
    table = make_table(title, ["method", "loss", judged, "distance", "sent", "seconds"])
    table.columns[0].justify = "left"
    for run in found.runs:
        value = getattr(run, judged)[-1]
        table.add_row(
            Text(run.method, "bold cyan"),
            f"{run.loss[-1]:.4g}",
            f"{100 * value:.1f} %" if scored else f"{value:.3g}",
            f"{run.consensus_distance[-1]:.3g}",
            format_bytes(float(run.bytes_sent[-1])),
            f"{run.seconds[-1]:.4g}",
        )
    return table


def _legend(runs: Sequence[Run], scenario: Scenario) -> str:
    scored = any(run.score[-1] == run.score[-1] for run in runs)
    judged = (
        "score       accuracy of the average model on images set aside"
        if scored
        else "error       distance of all ranks from the optimum, relative to its norm"
    )
    each, link = f"{1000 * scenario.step_seconds:g} ms", scenario.network.between
    return f"""[dim]\
loss        of the ranks' batches, on average since the last record
{judged}
distance    of the ranks' models from their average, root mean square
sent        bytes that a rank sends in all steps
seconds     of {runs[0].steps[-1]} steps: {each} each, and messages over {link}[/]"""


def write_files(
    found: MethodComparison, title: str, plot: Path | None, table_file: Path | None
) -> None:
    """Plot the curves and write all records, each if its file is given.

    Raises:
        ClickException: A file cannot be written, or has an unknown format.
    """
    from asyncddp import simulate

    if plot is not None:
        with writing("--plot", plot):
            simulate.draw(found.runs, title).savefig(plot)
    if table_file is not None:
        columns = simulate.table(found.runs)
        with (
            writing("--csv", table_file),
            table_file.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
