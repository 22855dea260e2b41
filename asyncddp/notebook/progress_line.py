"""Progress message for notebooks and terminals: one line that is updated in place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the shown text; the last text stays.

    It is silent where nobody sees it: in scripts whose standard error is no terminal.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is not None:
        yield _in_notebook()
    elif sys.stderr.isatty():
        from rich.console import Console

        console, last = Console(stderr=True), ""
        with console.status("") as status:

            def show(text: str) -> None:
                nonlocal last
                last = text
                status.update(text)

            yield show
        console.print(last, highlight=False)
    else:
        yield lambda text: None


def _in_notebook() -> Callable[[str], None]:
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        if text != shown:
            (handle.update if shown else handle.display)({"text/plain": text}, raw=True)
        shown = text

    return show
