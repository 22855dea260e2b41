"""NCCL bindings through cupy, private CUDA streams, and checks of the loaded libraries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncddp.config import read_variable, set_defaults
from asyncddp.device.cuda_streams import private_stream, use_stream
from asyncddp.errors import EnvironmentProblem
from asyncddp.install_commands import needed_package

CHANNELS = 8
"""Channels of a communicator for messages; each occupies one multiprocessor of the GPU."""

NCCL_ERRORS = (RuntimeError, KeyError)
"""Exceptions of cupy for NCCL errors; KeyError for error codes that cupy does not know."""

_SHARING_VERSION = 23000
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")

StreamContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes a context manager that sets this thread's current stream."""


class CupyBindings(NamedTuple):
    """Bindings that the NCCL transport uses: ``cupy.cuda.nccl``, and a factory of streams."""

    nccl: Any
    stream: Callable[[torch.device], StreamContext]


def library() -> CupyBindings:
    """Import NCCL through cupy; raise an EnvironmentProblem if cupy or its NCCL is missing."""
    need = "NCCL is reached through cupy, which cannot be imported"
    with needed_package(need, "cuda12", "cuda13"), warnings.catch_warnings(record=True) as said:
        from cupy.cuda import nccl
    if not nccl.available:
        why = "".join(f" ({warning.message})" for warning in said)
        raise EnvironmentProblem(
            f"cupy has found no NCCL{why}. torch's wheels for CUDA bring one, which cupy uses; "
            "without it install nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever is torch's CUDA"
        )

    def stream(device: torch.device) -> StreamContext:
        made = private_stream(device)
        return lambda: use_stream(made)

    return CupyBindings(nccl, stream)


def create_unique_id(nccl: Any) -> bytes:
    """Create the unique id of a new communicator, 128 bytes, for all its ranks."""
    return bytes(value % 256 for value in nccl.get_unique_id())


def limit_channels() -> None:
    """Set ``NCCL_MAX_P2P_NCHANNELS`` to 8 unless it is set (see ``point_to_point``)."""
    set_defaults({"NCCL_MAX_P2P_NCHANNELS": str(CHANNELS)})


def positive_setting(name: str, default: int) -> int:
    """Return the positive integer in an environment variable, or else the default."""
    text = read_variable(name, str) or ""
    return int(text) if text.isdecimal() and int(text) > 0 else default


def versions() -> tuple[str | None, int | None]:
    """Return the versions of cupy and its NCCL (22703 for 2.27.3); None if missing."""
    try:
        import cupy
    except ImportError:
        return None, None
    try:
        return str(cupy.__version__), int(library().nccl.get_version())
    except EnvironmentProblem:
        return str(cupy.__version__), None


def gpu_sharing_settings(nccl: int | None) -> tuple[str, bool]:
    """Return the host id set for NCCL, and whether NCCL is set to let ranks share a GPU.

    NCCL connects ranks on one GPU by sockets if their host ids differ.

    References:
        NCCL's documentation, "Environment Variables", ``NCCL_HOSTID`` and
        ``NCCL_MULTI_RANK_GPU_ENABLE``.
    """
    asked = read_variable("NCCL_MULTI_RANK_GPU_ENABLE", str) == "1"
    return read_variable("NCCL_HOSTID", str) or "", asked and (nccl or 0) >= _SHARING_VERSION


def describe_conflict(nccl: int | None, maps: Path = Path("/proc/self/maps")) -> str:
    """Describe a conflict between cupy's NCCL and others in this process; empty if none."""
    if nccl is None:
        return ""
    loaded: list[str] = []
    with suppress(OSError):
        loaded = sorted(set(re.findall(r"\S+/libnccl\.so\S*", maps.read_text())))
    remedy = "keep one wheel of nvidia-nccl, and no other NCCL in LD_LIBRARY_PATH"
    if len(loaded) > 1:
        return f"this process has loaded several NCCL libraries, {' and '.join(loaded)}: {remedy}"
    for name in _WHEELS:
        with suppress(PackageNotFoundError):
            found = version(name)
            if _code(found) == nccl:
                return ""
            return f"cupy has loaded NCCL {nccl}, and torch's wheel is {name} {found}: {remedy}"
    return ""


def _code(text: str) -> int:
    """Encode a version as NCCL does since 2.9: 22703 for "2.27.3"."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", f"{text}.0.0")[:3])
    return major * 10_000 + minor * 100 + patch
