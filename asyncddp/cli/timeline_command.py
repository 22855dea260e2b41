"""``asyncddp timeline``: merges the ranks' traces for Perfetto, and reports where time goes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from asyncddp.cli.console import make_console, writing
from asyncddp.cli.main import SuggestingCommandGroup
from asyncddp.cli.options import IntegerParamType
from asyncddp.errors import ArgumentError
from asyncddp.rank_list_text import list_ranks

if TYPE_CHECKING:
    from asyncddp.timeline.merged_trace import MergedTrace
    from asyncddp.timeline.report.trace_spans import TimelineSpans
    from asyncddp.timeline.trace_files import ProgressCallback

_LONG = 30_000_000  # bytes to read from which on progress is shown
_FILE = click.Path(path_type=Path, dir_okay=False)
_SOURCES = click.argument("sources", nargs=-1, required=True, metavar="DIR|PREFIX|FILE…")


@click.group("timeline", cls=SuggestingCommandGroup)
def timeline_command() -> None:
    """See what happened when, on all ranks.

    \b
      asyncddp run -np 4 --timeline out train.py      every rank records, out/rank0.json …
      asyncddp timeline merge out -o trace.json       one file, on one clock
      asyncddp timeline report trace.json             a table: who waits for whom

    The merged file opens at https://ui.perfetto.dev: "Open trace file". Nothing leaves the
    browser. A run that was killed can be read as well.
    """  # noqa: D301 - click reads the \b


@timeline_command.command("merge", short_help="Make one file of all ranks'.")
@_SOURCES
@click.option(
    "-o", "--output", type=_FILE, default=Path("trace.json"), metavar="FILE",
    help="What to write; packed if it ends with .gz [trace.json].",
)  # fmt: skip
def merge_command(sources: tuple[str, ...], output: Path) -> None:
    """Merge the ranks' files of a run into one, on the clock of rank 0.

    \b
      asyncddp timeline merge out
      asyncddp timeline merge out/bf_ -o trace.json.gz     a prefix: out/bf_0.json …
      asyncddp timeline merge out/rank0.json out/rank3.json

    Time 0 is the start of rank 0. Messages are arrows from a send to its receive; those of which
    one end is in no file are left out, and counted.
    """  # noqa: D301 - click reads the \b
    from asyncddp.timeline.merged_trace import open_traces, write_merged_trace

    with _progress_bar(sources) as advance:
        merge = open_traces(sources, advance)
        events = write_merged_trace(merge, output, advance)
    for line in _merge_notes(merge):
        click.echo(line)
    count = len(merge.files)
    click.echo(f"Wrote {output}: {events} events of {count} rank{'s'[: count != 1]}.")
    click.echo('Open it at https://ui.perfetto.dev with "Open trace file", or read it as a table:')
    click.echo(f"  asyncddp timeline report {output}")


@timeline_command.command("report", short_help="Show who waits for whom.")
@_SOURCES
@click.option(
    "--json", "as_json", type=_FILE, metavar="FILE", help="Write the figures; - prints them."
)
@click.option("--plot", type=_FILE, metavar="FILE", help="Write a picture: report.png, .svg.")
@click.option(
    "--skip", type=IntegerParamType(least=0), metavar="N",
    help="Steps of warm-up to leave out [1, if there are more].",
)  # fmt: skip
def timeline_report_command(
    sources: tuple[str, ...], as_json: Path | None, plot: Path | None, skip: int | None
) -> None:
    """Show where the time of each rank goes, from a merged file or from the ranks' own.

    \b
      asyncddp timeline report trace.json
      asyncddp timeline report out --skip 10 --plot report.png --json report.json

    A step is compute, communication that the rank was held up by (exposed), and the rest (other).
    Communication under way while the rank computes is hidden, and costs nothing. A rank for which
    the others wait and that waits for nobody is the one to look at.
    """  # noqa: D301 - click reads the \b
    from asyncddp.timeline.report.timeline_report import build_report

    with _progress_bar(sources) as advance:
        recording = _read_recording(sources, advance)
    figures = build_report(recording, skip)
    if as_json != Path("-"):
        from asyncddp.cli.timeline_table import show_report

        show_report(make_console(), figures)
    if as_json is not None:
        text = json.dumps(figures.as_dict(), indent=2, allow_nan=False)
        if as_json == Path("-"):
            click.echo(text)
        else:
            with writing("--json", as_json, failure=ArgumentError):
                as_json.write_text(text + "\n")
    if plot is not None:
        from asyncddp.timeline.report.timeline_plot import draw_timeline

        figure = draw_timeline(recording, figures)
        with writing("--plot", plot, failure=ArgumentError):
            figure.savefig(plot)


def _read_recording(sources: tuple[str, ...], advance: ProgressCallback) -> TimelineSpans:
    from asyncddp.timeline.merged_trace import open_traces
    from asyncddp.timeline.report.trace_spans import collect_spans
    from asyncddp.timeline.trace_files import is_merged, read_events

    only = Path(sources[0])
    if len(sources) == 1 and only.is_file() and is_merged(only):
        return collect_spans(read_events(only, advance))
    return collect_spans(open_traces(sources, advance).events(advance))


def _merge_notes(merge: MergedTrace) -> Iterator[str]:
    for path in merge.silent:
        yield f"{path} is empty: its rank was ended before it wrote an event."
    if merge.missing:
        yield f"Of {merge.size} ranks, no events are there of {list_ranks(merge.missing)}."
    if merge.unmeasured:
        yield (
            f"Never measured was the clock of {list_ranks(merge.unmeasured)}. It is placed by its "
            "machine's wall clock, which may be wrong by milliseconds or more."
        )
    if merge.clock_error is not None:
        drift = f", drift about {1e6 * merge.drift:.2g} ppm" if merge.drift else ""
        digits = int(merge.clock_error < 10)
        yield f"Clocks: error at most {merge.clock_error:.{digits}f} µs{drift}."
    if merge.arrows.dropped:
        yield f"Left out {merge.arrows.dropped} ends of messages whose other end is in no file."


@contextlib.contextmanager
def _progress_bar(sources: tuple[str, ...]) -> Iterator[ProgressCallback]:
    from asyncddp.timeline.trace_files import find_trace_files, no_progress

    total = 2 * sum(path.stat().st_size for path in find_trace_files(sources))
    if total < _LONG or not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import Progress

    seen: dict[Path, int] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Reading", total=total)

        def advance(path: Path, behind: int) -> None:
            before = seen.get(path, 0)
            seen[path] = behind
            progress.advance(task, behind - before if behind > before else behind)

        yield advance
