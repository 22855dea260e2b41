"""Hooks around notebook cells, which keep ranks from waiting for a rank whose cell has failed.

A rank whose cell raises announces to its peers that it takes no part until the next cell. The
client then compares the ranks' :func:`operation_counts` and calls :func:`resume` or
:func:`fail_further_operations` on all of them. The library is used only where a cell has imported
it, since importing it takes seconds.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncddp.engine import ProgressEngine


def _current_engine() -> ProgressEngine | None:
    module = sys.modules.get("asyncddp.context.context")
    if module is None or not module.is_initialized():
        return None
    engine: ProgressEngine = module.current().engine
    return engine


def install_cell_hooks(kernel: Any) -> None:
    """Install hooks around an engine's notebook cells and around applied functions."""
    kernel.shell.events.register("pre_run_cell", lambda info: resume())
    kernel.shell.events.register("post_run_cell", _after_cell)
    apply = kernel.do_apply

    @functools.wraps(apply)
    def do_apply(*args: Any, **kwargs: Any) -> Any:
        resume()
        reply, buffers = apply(*args, **kwargs)
        if reply["status"] == "error":
            _announce_failure(f"its function ended with {reply['ename']}: {reply['evalue']}")
        return reply, buffers

    kernel.do_apply = do_apply


def _after_cell(result: Any) -> None:
    error = result.error_in_exec
    if error is not None:
        _announce_failure(f"its cell ended with {type(error).__name__}: {error}")


def _announce_failure(reason: str) -> None:
    if (engine := _current_engine()) is not None:
        engine.announce_exit(reason)


def operation_counts() -> dict[str, int] | None:
    """Return how often this rank has called each named operation; None before ``init()``."""
    engine = _current_engine()
    return None if engine is None else engine.use_counts()


def resume() -> None:
    """Allow communication again after failed cells."""
    engine = _current_engine()
    if engine is not None and not engine.closed:
        engine.readmit_peers()


def fail_further_operations(reason: str) -> None:
    """Make every further operation fail for the given reason, until ``shutdown()``."""
    if (engine := _current_engine()) is not None:
        engine.fail_all(reason)
