"""Creates a rank's tracer from its settings: opens the trace file and records metadata."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch

import asyncddp
from asyncddp.config import Config
from asyncddp.timeline.trace_writer import TraceWriter
from asyncddp.timeline.tracer import Tracer


def trace_path(where: str, rank: int) -> Path:
    """Return the path of a rank's trace file: in ``out/``, by ``run-{rank}.json``, or ``run-…``."""
    if "{rank}" in where:
        return Path(where.replace("{rank}", str(rank)))
    in_folder = where.endswith((os.sep, os.altsep or os.sep)) or Path(where).is_dir()
    return Path(where, f"rank{rank}.json") if in_folder else Path(f"{where}{rank}.json")


def create_tracer(config: Config, rank: int, size: int) -> Tracer | None:
    """Create the tracer that a rank's settings ask for, or return None."""
    nvtx = config.nvtx and torch.cuda.is_available()
    if config.timeline is None:
        return Tracer(rank, None, nvtx=True) if nvtx else None
    tracer = Tracer(rank, TraceWriter(trace_path(config.timeline, rank), rank), nvtx=nvtx)
    host = socket.gethostname()
    tracer.record_metadata("process_name", {"name": f"rank {rank} on {host}"})
    tracer.record_metadata("process_sort_index", {"sort_index": rank})
    facts = {"rank": rank, "size": size, "host": host, "version": 1}
    facts |= {"library": asyncddp.__version__, "started_unix": time.time()}
    tracer.record_metadata("asyncddp.rank", facts)
    return tracer
