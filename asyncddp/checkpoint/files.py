"""Atomic file writes, file digests, and checks that ``torch.load`` can read an object."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncddp.errors import ArgumentError
from asyncddp.whole_files import written_whole

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, OrderedDict)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically: under a temporary name, then renamed."""
    with written_whole(file) as temporary:
        write(temporary)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that its file names survive a power failure, if supported."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_tensors(content: Any, file: Path) -> None:
    """Write a file by ``torch.save`` atomically; raise OSError if the disk is full."""

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


def check_loadable(where: str, value: Any) -> None:
    """Raise an error naming the entry that ``torch.load(weights_only=True)`` would reject.

    Args:
        where: What the value is in messages, such as ``"extra"``.
        value: Tensors, numbers, strings, bytes, None, lists, tuples and dicts of them, and what
            users have allowed by ``torch.serialization.add_safe_globals``.

    Example:
        >>> check_loadable("extra", {"loss": [0.5]})
        >>> check_loadable("extra", {"done": {"when": range(3)}})
        Traceback (most recent call last):
        asyncddp.errors.ArgumentError: argument extra['done']['when']: expected tensors, ...
    """
    _check(where, value, set())


def _check(where: str, value: Any, seen: set[int]) -> None:
    if type(value) in _PLAIN or type(value) in _TENSORS or id(value) in seen:
        return
    if type(value) not in _CONTAINERS:
        _round_trip(where, value)
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, one in value.items():
            _check(f"{where}: key {key!r}", key, seen)
            _check(f"{where}[{key!r}]", one, seen)
    else:
        for place, one in enumerate(value):
            _check(f"{where}[{place}]", one, seen)


def _round_trip(where: str, value: Any) -> None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise ArgumentError(
            f"argument {where}: expected tensors, numbers, strings, bytes, None, and lists, tuples "
            "and dicts of them, which torch.load(weights_only=True) reads, got "
            f"{kind}; give its state_dict(), .item(), .tolist() or torch.as_tensor() of it, or "
            "allow its class by torch.serialization.add_safe_globals"
        ) from error
