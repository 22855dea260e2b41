"""A progress line that is redrawn between measurements only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

__all__ = ["progress_line"]


@contextmanager
def progress_line(title: str, total: int | None, *, shows: bool) -> Iterator[Callable[[str], None]]:
    """Show how far a measurement is, on stderr.

    Args:
        title: What is measured.
        total: How many steps it takes; None where nobody knows.
        shows: Whether this rank shows anything.

    Yields:
        To be called with a text after each step.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=not shows)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(title, total=total)
        progress.refresh()

        def advance(text: str) -> None:
            progress.update(task, advance=1, description=f"{title}, {text}")
            progress.refresh()

        yield advance
