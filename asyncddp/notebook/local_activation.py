"""Registers the magic ``%%px`` for ranks that are threads of the IPython session."""

from __future__ import annotations

import atexit
from typing import Any

from asyncddp.errors import UsageError
from asyncddp.launch.cluster.profile_directory import missing_package
from asyncddp.notebook.local_view import LocalView
from asyncddp.thread_world import LocalWorld


def activate(world: LocalWorld) -> LocalView:
    """Register ``%%px`` for the ranks of a local world; see :meth:`asyncddp.LocalWorld.activate`.

    Raises:
        UsageError: This is no IPython session.
        EnvironmentProblem: IPython is not installed.
    """
    try:
        from IPython.core.getipython import get_ipython

        from asyncddp.notebook.local_magics import LocalCellMagics
    except ImportError as problem:
        raise missing_package("IPython") from problem
    shell: Any = get_ipython()
    if shell is None:
        raise UsageError("activate: cells need IPython or a notebook; in a script use world.run()")
    if not world.contexts:
        world.__enter__()
        atexit.register(world.__exit__, None, None, None)
    view = LocalView(world)
    shell.register_magics(LocalCellMagics(shell, view))
    return view
