"""``together``: file operations that succeed on all ranks or raise an error on all."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import TypeVar

from asyncddp.context import current, is_initialized
from asyncddp.errors import ArgumentError, AsyncDDPError, EnvironmentProblem, UsageError
from asyncddp.ops.object_collectives import gather_records

T = TypeVar("T")

FILE_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    LookupError,
    ArithmeticError,
    EOFError,
    MemoryError,
    struct.error,
    pickle.PickleError,
)
"""Exceptions of ``torch.save`` and ``torch.load`` for full disks, damaged files and odd objects.

Each byte of a file may be another one: a wrong length, opcode or name ends in any of these.
"""


def together(verb: str, what: str, action: Callable[[], T]) -> T:
    """Run an action on all ranks; if it fails on one, raise an error on all of them; collective.

    A process outside a world runs the action alone. Mistakes of the caller stay
    :class:`ArgumentError`, all other errors become :class:`EnvironmentProblem`.
    """
    kind, text, result = "", "", None
    try:
        result = action()
    except UsageError as error:
        kind, text = "argument", str(error)
    except EnvironmentProblem as error:
        kind, text = "environment", str(error)
    except AsyncDDPError:
        raise  # the other ranks know of it
    except FILE_ERRORS as error:
        kind, text = "environment", f"could not {what}: {str(error) or type(error).__name__}"
    problems, ranks = [[kind, text]], [0]
    if is_initialized():
        problems = gather_records([kind, text], list[str], verb)
        ranks = list(current().members)
    for rank, (kind, text) in zip(ranks, problems, strict=True):
        if kind:
            if kind == "argument":
                raise ArgumentError(text if text.startswith(verb) else f"{verb}: {text}")
            who = f"rank {rank} " if len(problems) > 1 else ""
            raise EnvironmentProblem(f"{verb}: {who}{text}")
    return result  # type: ignore[return-value] # it is the action's
