"""``asyncddp timeline``: what the ranks wrote, as one file for Perfetto and as a table."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from asyncddp.errors import ArgumentError
from asyncddp.launch.cli import PlainGroup
from asyncddp.launch.options import Count
from asyncddp.rank_lists import list_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from asyncddp.timeline.merging import Merge
    from asyncddp.timeline.report_spans import Recording
    from asyncddp.timeline.reporting import Report

    Advance: TypeAlias = Callable[[Path, int], object]

__all__ = ["timeline_command"]

_LONG = 30_000_000  # bytes to read from which on progress is shown
_HELP = {"help_option_names": ["-h", "--help"]}
_FILE = click.Path(path_type=Path, dir_okay=False)
_SOURCES = click.argument("sources", nargs=-1, required=True, metavar="DIR|PREFIX|FILE…")


@click.group(
    "timeline",
    cls=PlainGroup,
    short_help="Merge and read what ranks recorded.",
    context_settings=_HELP,
)
def timeline_command() -> None:
    """See what happened when, on all ranks.

    \b
      asyncddp run -np 4 --timeline out train.py      every rank records, out/rank0.json …
      asyncddp timeline merge out -o trace.json       one file, on one clock
      asyncddp timeline report trace.json             a table: who waits for whom

    The merged file opens at https://ui.perfetto.dev: "Open trace file". Nothing leaves the
    browser. A run that was killed can be read as well.
    """  # noqa: D301 - click reads the \b


@timeline_command.command(
    "merge", short_help="Make one file of all ranks'.", context_settings=_HELP
)
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
    from asyncddp.timeline.merging import open_ranks, write

    with _progress(sources) as advance:
        merge = open_ranks(sources, advance)
        events = write(merge, output, advance)
    for line in _about(merge):
        click.echo(line)
    count = len(merge.files)
    click.echo(f"Wrote {output}: {events} events of {count} rank{'s'[: count != 1]}.")
    click.echo('Open it at https://ui.perfetto.dev with "Open trace file", or read it as a table:')
    click.echo(f"  asyncddp timeline report {output}")


@timeline_command.command("report", short_help="Show who waits for whom.", context_settings=_HELP)
@_SOURCES
@click.option(
    "--json", "as_json", type=_FILE, metavar="FILE", help="Write the figures; - prints them."
)
@click.option("--plot", type=_FILE, metavar="FILE", help="Write a picture: report.png, .svg.")
@click.option(
    "--skip", type=Count(least=0), metavar="N",
    help="Steps of warm-up to leave out [1, if there are more].",
)  # fmt: skip
def report_command(
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
    from asyncddp.timeline.reporting import report

    with _progress(sources) as advance:
        recording = _recording(sources, advance)
    figures = report(recording, skip)
    if as_json != Path("-"):
        from asyncddp.launch.timeline_table import show_report

        show_report(_console(), figures)
    if as_json is not None:
        _write_json(figures, as_json)
    if plot is not None:
        _write_picture(recording, figures, plot)


def _recording(sources: tuple[str, ...], advance: Advance) -> Recording:
    """The spans of a merged file, or of ranks' files merged on the way."""
    from asyncddp.timeline.merging import open_ranks
    from asyncddp.timeline.reading import is_merged, read_events
    from asyncddp.timeline.report_spans import record

    only = Path(sources[0])
    if len(sources) == 1 and only.is_file() and is_merged(only):
        return record(read_events(only, lambda behind: advance(only, behind)))
    return record(open_ranks(sources, advance).events(advance))


def _about(merge: Merge) -> Iterator[str]:
    """What is to be said of a merge: who is missing, how far the clocks can be trusted."""
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
def _progress(sources: tuple[str, ...]) -> Iterator[Advance]:
    """A bar on a terminal where there is much to read, and nothing elsewhere."""
    from asyncddp.timeline.reading import find_files

    total = 2 * sum(path.stat().st_size for path in find_files(sources))
    if total < _LONG or not sys.stderr.isatty():
        yield lambda _path, _behind: None
        return
    from rich.console import Console
    from rich.progress import Progress

    seen: dict[Path, int] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Reading", total=total)

        def advance(path: Path, behind: int) -> None:
            """Show how much of a file is read."""
            before = seen.get(path, 0)
            seen[path] = behind
            progress.advance(task, behind - before if behind > before else behind)

        yield advance


def _console() -> Console:
    """A console that does not wrap the table where its output is read by a program."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else max(160, shutil.get_terminal_size().columns)
    return Console(width=width, highlight=False)


def _write_json(figures: Report, path: Path) -> None:
    text = json.dumps(figures.as_dict(), indent=2, allow_nan=False)
    if path == Path("-"):
        click.echo(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ArgumentError(f"--json {path} cannot be written: {error}.") from error
    click.echo(f"Wrote {path}.")


def _write_picture(recording: Recording, figures: Report, path: Path) -> None:
    from asyncddp.timeline.picture import draw

    try:
        draw(recording, figures).savefig(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--plot {path} cannot be written: {error}.") from error
    click.echo(f"Wrote {path}.")
