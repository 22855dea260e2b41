"""Files that are whole or not there, and file work that succeeds on all ranks or fails on all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from asyncddp.context import is_initialized
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
"""What ``torch.save`` and ``torch.load`` raise for full disks, damaged files and odd objects.

Each byte of a file may be another one: a wrong length, opcode or name ends in any of these.
"""


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name and rename it, so that it is whole or not there."""
    temporary = file.with_name(f"{file.name}.{uuid4().hex[:8]}.part")
    try:
        write(temporary)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_tensors(content: Any, file: Path) -> None:
    """Write a file by ``torch.save``, whole or not at all; a full disk is the system's error."""

    def save(part: Path) -> None:
        with part.open("wb") as stream:
            torch.save(content, stream)

    try:
        write_whole(file, save)
    except RuntimeError as error:  # torch's own, with the system's behind it
        cause = error.__context__
        if isinstance(cause, OSError):
            raise cause from error
        raise


def digest_of(file: Path) -> str:
    """Return the BLAKE2b digest of a file, as ``b2sum -l 256`` prints it."""
    found = hashlib.blake2b(digest_size=32)
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def together(verb: str, what: str, action: Callable[[], T]) -> T:
    """Do something on all ranks; where it fails on one, raise an error that says so on all.

    Collective, but for a process outside a world, which is alone. Mistakes of the caller stay
    :class:`ArgumentError`, all else becomes :class:`EnvironmentProblem`.
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
    problems = [[kind, text]]
    if is_initialized():
        problems = gather_records([kind, text], list[str], verb)
    for rank, (kind, text) in enumerate(problems):
        if kind:
            if kind == "argument":
                raise ArgumentError(text if text.startswith(verb) else f"{verb}: {text}")
            who = f"rank {rank} " if len(problems) > 1 else ""
            raise EnvironmentProblem(f"{verb}: {who}{text}")
    return result  # type: ignore[return-value] # it is the action's
