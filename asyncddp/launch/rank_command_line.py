"""Builds the command line of each rank; Python scripts go through :mod:`asyncddp.launch.rank`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncddp.errors import ArgumentError

_RUNNER = ("-m", "asyncddp.launch.rank")


def build_rank_program(words: Sequence[str], *, module: bool, here: bool = True) -> tuple[str, ...]:
    """Return the command line with which every rank is started.

    Args:
        words: The script, module or program, and its arguments.
        module: Whether the first word is the name of a module, as after ``python -m``.
        here: Whether it must be found on this machine.

    Raises:
        ArgumentError: There is no such script or program.

    Example:
        >>> build_rank_program(["train.py", "--lr", "0.1"], module=False, here=False)[1:]
        ('-m', 'asyncddp.launch.rank', 'train.py', '--lr', '0.1')
        >>> build_rank_program(["./solver", "in.dat"], module=False, here=False)
        ('./solver', 'in.dat')
    """
    if module:
        return (sys.executable, *_RUNNER, "-m", *words)
    words = _without_python(words)
    first = words[0]
    if first == "-m" or first.endswith((".py", ".pyc")):
        if first != "-m" and here and not Path(first).is_file():
            raise ArgumentError(f"no such script: {first!r} (looked in {Path.cwd()}).")
        return (sys.executable, *_RUNNER, *words)
    if here and shutil.which(first) is None:
        raise ArgumentError(
            f"no such program: {first!r}. A Python script ends in .py; a module is run by "
            f"'asyncddp run -m {first}'; a program must be on PATH or given with its path."
        )
    return tuple(words)


def _without_python(words: Sequence[str]) -> Sequence[str]:
    """Drop a leading ``python`` if it is this one: ``python train.py`` is run as ``train.py``."""
    if len(words) < 2 or not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return words
    named = shutil.which(words[0])
    if named is None or Path(named).parent != Path(sys.executable).parent:
        return words
    rest = words[2:] if words[1] == "-u" else words[1:]
    takes = bool(rest) and (rest[0].endswith(".py") or (rest[0] == "-m" and len(rest) > 1))
    return rest if takes else words
