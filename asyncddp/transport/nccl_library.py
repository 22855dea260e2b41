"""The door to NCCL: cupy's bindings, streams that nobody shares, and which libraries are loaded."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncddp.errors import EnvironmentProblem
from asyncddp.packages import install_command

__all__ = [
    "CHANNELS",
    "Current",
    "Library",
    "doubt",
    "join",
    "library",
    "limit_channels",
    "new_identity",
    "versions",
]

CHANNELS = 8
"""Channels of a communicator for messages, each of which takes one multiprocessor of the GPU."""

_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_KEPT: list[Any] = []

Current: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""While what it gives is entered, a stream is the current one of this thread."""


class Library(NamedTuple):
    """What is used of cupy.

    Attributes:
        nccl: Its module ``cupy.cuda.nccl``.
        stream: Makes a stream of a device that nobody else uses.
    """

    nccl: Any
    stream: Callable[[torch.device], Current]


def library() -> Library:
    """NCCL through cupy.

    Raises:
        EnvironmentProblem: cupy is not there, or has no NCCL.
    """
    try:
        with warnings.catch_warnings(record=True) as said:
            from cupy.cuda import Stream, nccl
    except ImportError as problem:
        raise EnvironmentProblem(
            f"NCCL is reached through cupy, which cannot be imported ({problem}); install it with "
            + install_command("cuda12", "cuda13")
        ) from problem
    if not nccl.available:
        why = "".join(f" ({warning.message})" for warning in said)
        raise EnvironmentProblem(
            f"cupy has found no NCCL{why}. torch's wheels for CUDA bring one, which cupy uses; "
            "without it install nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever is torch's CUDA"
        )

    def stream(device: torch.device) -> Current:
        """Make one; torch's own come from a pool of 32, in which two users may meet in one."""
        with torch.cuda.device(device):
            made = Stream(non_blocking=True)
        _KEPT.append(made)  # torch's allocator may ask for it long after its communicator's end
        wrapped = torch.cuda.ExternalStream(made.ptr, device)  # type: ignore[no-untyped-call]
        return lambda: torch.cuda.stream(wrapped)

    return Library(nccl, stream)


def new_identity(nccl: Any) -> bytes:
    """Make the identity of a communicator, of which its other ranks are told: 128 bytes.

    Args:
        nccl: cupy's module of NCCL.
    """
    return bytes(value % 256 for value in nccl.get_unique_id())


def join(nccl: Any, size: int, identity: bytes, rank: int) -> Any:
    """Join a communicator; waits for all its ranks.

    cupy takes the identity as bytes since version 14, and as a tuple of signed numbers before it.

    Args:
        nccl: cupy's module of NCCL.
        size: Number of ranks.
        identity: What one of them has made.
        rank: The number of this one.

    Raises:
        RuntimeError: NCCL refuses; cupy's message says why.
    """
    try:
        return nccl.NcclCommunicator(size, identity, rank)
    except TypeError:
        signed = tuple(value - 256 if value > 127 else value for value in identity)
        return nccl.NcclCommunicator(size, signed, rank)


def limit_channels() -> None:
    """Set ``NCCL_MAX_P2P_NCHANNELS`` to 8 unless it is set; NCCL reads it once.

    :mod:`~asyncddp.transport.nccl_pairs` says why.
    """
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(CHANNELS))


def versions() -> tuple[str | None, int | None]:
    """Versions of cupy and of its NCCL, as 22703 for 2.27.3; None for what is not there."""
    try:
        import cupy
    except ImportError:
        return None, None
    try:
        return str(cupy.__version__), int(library().nccl.get_version())
    except EnvironmentProblem:
        return str(cupy.__version__), None


def doubt(nccl: int | None, maps: Path = Path("/proc/self/maps")) -> str:
    """What is strange about the NCCL of this process; empty where nothing is.

    Args:
        nccl: Version of the one that cupy uses; None where it has none.
        maps: Where the system says what this process has loaded.

    Example:
        >>> doubt(None)
        ''
    """
    if nccl is None:
        return ""
    try:
        loaded = sorted(set(re.findall(r"\S+/libnccl\.so\S*", maps.read_text())))
    except OSError:
        loaded = []
    remedy = "keep one wheel of nvidia-nccl, and no other NCCL in LD_LIBRARY_PATH"
    if len(loaded) > 1:
        return f"this process has loaded several NCCL libraries, {' and '.join(loaded)}: {remedy}"
    wheel = _wheel()
    if wheel is not None and _code(wheel[1]) != nccl:
        return f"cupy has loaded NCCL {nccl}, and torch's wheel is {wheel[0]} {wheel[1]}: {remedy}"
    return ""


def _wheel() -> tuple[str, str] | None:
    """Name and version of the wheel from which torch loads NCCL; None where there is none."""
    for name in _WHEELS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _code(text: str) -> int:
    """A version as NCCL writes it, since 2.9: 22703 for "2.27.3"."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", f"{text}.0.0")[:3])
    return major * 10_000 + minor * 100 + patch
