"""Sessions of IPython in this process, in which tests run cells as a notebook does."""

from __future__ import annotations

import atexit
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["Session", "open_session", "plain"]

_MODULE = "cells_of_the_tests"


def plain(text: str) -> str:
    """A text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Session:
    """Runs cells.

    Attributes:
        shell: The IPython shell.
        names: The names that cells have made.
    """

    def __init__(self, shell: Any) -> None:
        self.shell, self.names = shell, shell.user_ns

    def __call__(self, cell: str) -> Any:
        """Run a cell; gives its value, or the exception that ended it."""
        result = self.shell.run_cell(cell)
        return result.error_before_exec or result.error_in_exec or result.result


@contextmanager
def open_session() -> Iterator[Session]:
    """The one IPython shell that there can be, without history; skips where IPython is missing."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    with pytest.MonkeyPatch.context() as patch:
        module = types.ModuleType(_MODULE)
        patch.setitem(sys.modules, _MODULE, module)
        shell = interactiveshell.InteractiveShell.instance(config=config, user_module=module)
        try:
            yield Session(shell)
        finally:
            interactiveshell.InteractiveShell.clear_instance()
            _forget(shell)


def _forget(shell: Any) -> None:
    """Let go of what a shell holds, and of those who hold it: later tests look for what is left."""
    atexit.unregister(shell.atexit_operations)
    shell.user_ns.clear()
    shell.configurables.clear()
    shell.magics_manager.registry.clear()
    for magics in shell.magics_manager.magics.values():
        magics.clear()
    shell.events.callbacks.clear()
    shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
