"""How the ranks of an MPI job meet in ``init()``: with a deadline, and alike in settings."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import asyncddp
from asyncddp.errors import MismatchError
from asyncddp.transport.mpi_library import MPI, start_mpi
from asyncddp.transport.mpi_tuning import ALGORITHM, algorithm_of_sums, choose_algorithm_of_sums
from asyncddp.transport.starting import Presence, Start

__all__ = ["come_together"]

_LOOK = 0.02  # seconds
_BYTES = 1024  # of one rank's settings
_unfinished: list[MPI.Request] = []
"""A barrier whose deadline has passed; the next ``init()`` goes on with it."""


def come_together(start: Start) -> None:
    """Start MPI and wait until all ranks are here and known to be alike; collective.

    Raises:
        WaitTimeoutError: A rank has not come by the deadline. While MPI itself waits for a process
            nothing can be raised: then this process ends, saying the same.
        MismatchError: On all ranks, if a setting that they must share differs.
    """
    with ExitStack() as waiting:
        presence = Presence.of(start.rank, os.environ) if start.size > 1 else None
        if presence is not None:
            start.presence = waiting.enter_context(presence)
        _start_watched(start)
        _wait_for_all(start)
    _agree(start)


def _start_watched(start: Start) -> None:
    """Start MPI, while a thread looks at the clock."""
    if MPI.Is_initialized():
        return
    started = threading.Event()

    def watch() -> None:
        """End this process where the deadline passes."""
        while not started.wait(min(0.1, start.config.timeout)):
            error = start.look()
            if error is not None and not started.is_set():
                start.end(error)

    thread = threading.Thread(target=watch, name="asyncddp-init", daemon=True)
    thread.start()
    try:
        start_mpi()
    finally:
        started.set()
        thread.join()


def _wait_for_all(start: Start) -> None:
    """A barrier of all processes, with a deadline."""
    request = _unfinished.pop() if _unfinished else MPI.COMM_WORLD.Ibarrier()
    attempt = 0
    while not request.Test():
        error = start.look()
        if error is not None:
            _unfinished.append(request)
            raise error
        attempt += 1
        time.sleep(0.0 if attempt < 1000 else _LOOK)


def _agree(start: Start) -> None:
    """Compare what must be the same on all ranks, before anything depends on it."""
    comm, config = MPI.COMM_WORLD, start.config
    algorithm = algorithm_of_sums()
    mine = {
        "the version of asyncddp": asyncddp.__version__,
        "ASYNCDDP_TRANSPORT": config.transport or "shared_memory",
        "ASYNCDDP_DEVICE_WIRES": config.device_wires,
        "ASYNCDDP_RANKS_PER_MACHINE": config.ranks_per_machine,
        "ASYNCDDP_CHECK": config.check,
        f"OMPI_MCA_{ALGORITHM}": algorithm,
    }
    packed = json.dumps(mine).encode()[:_BYTES].ljust(_BYTES)
    every = np.empty(comm.size * _BYTES, dtype=np.uint8)
    comm.Allgather(np.frombuffer(packed, dtype=np.uint8), every)
    texts = [bytes(every[r * _BYTES : (r + 1) * _BYTES]) for r in range(comm.size)]
    if len(set(texts)) > 1:
        _complain(comm.rank, [json.loads(text) for text in texts])
    choose_algorithm_of_sums({algorithm})


def _complain(rank: int, every: Sequence[dict[str, Any]]) -> None:
    for name, first in every[0].items():
        for other, settings in enumerate(every):
            if settings.get(name) != first:
                raise MismatchError(
                    f"rank {rank}: init(): all ranks need the same settings, but {name} is "
                    f"{first!r} on rank 0 and {settings.get(name)!r} on rank {other}; set it alike "
                    "for all ranks, as asyncddp run and the -x of mpirun do"
                )
