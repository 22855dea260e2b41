"""How a rank's timeline begins: where its file lies, and what that says of the rank."""

from __future__ import annotations

import os
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asyncddp.config import Config
from asyncddp.timeline.ranges import reaches_nvtx
from asyncddp.timeline.recorder import Recorder
from asyncddp.timeline.writer import Writer

__all__ = ["file_of", "recorder_for"]


def file_of(where: str, rank: int) -> Path:
    """A rank's file: in a folder, or named after a prefix.

    Args:
        where: An existing folder, or one to be made, which ends with a separator; a path with
            ``{rank}`` in it; or else the prefix of a path.
        rank: The rank.

    Example:
        >>> [str(file_of(where, 2)) for where in ("out/", "run-{rank}.json", "run-")]
        ['out/rank2.json', 'run-2.json', 'run-2.json']
    """
    if "{rank}" in where:
        return Path(where.replace("{rank}", str(rank)))
    if where.endswith((os.sep, os.altsep or os.sep)) or Path(where).is_dir():
        return Path(where, f"rank{rank}.json")
    return Path(f"{where}{rank}.json")


def recorder_for(config: Config, rank: int, size: int) -> Recorder | None:
    """The recorder that a rank's settings ask for, or None.

    Raises:
        ArgumentError: The file cannot be made.
    """
    nvtx = reaches_nvtx(wanted=config.nvtx)
    if config.timeline is None:
        return Recorder(rank, None, nvtx=True) if nvtx else None
    recorder = Recorder(rank, Writer(file_of(config.timeline, rank), rank), nvtx=nvtx)
    host = socket.gethostname()
    recorder.fact("process_name", {"name": f"rank {rank} on {host}"})
    recorder.fact("process_sort_index", {"sort_index": rank})
    recorder.fact(
        "asyncddp.rank",
        {
            "rank": rank,
            "size": size,
            "host": host,
            "version": 1,
            "library": _library(),
            "started_unix": time.time(),
        },
    )
    return recorder


def _library() -> str:
    """The version of this library, where it is installed."""
    try:
        return version("asyncddp")
    except PackageNotFoundError:
        return "unknown"
