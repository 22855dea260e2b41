"""Startup of MPI in ``init()``: initializes it, waits for all ranks, and compares settings."""

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
from asyncddp.transport import DEFAULT_TRANSPORT
from asyncddp.transport.mpi.iallreduce_tuning import (
    ALGORITHM,
    iallreduce_algorithm,
    select_iallreduce_algorithm,
)
from asyncddp.transport.mpi.runtime import MPI, initialize_mpi
from asyncddp.transport.startup_deadline import InitArrivalTracker, StartupDeadline

_POLL_SECONDS = 0.02  # seconds
_SETTINGS_BYTES = 1024  # of one rank's settings
_pending_barriers: list[MPI.Request] = []
"""Barriers whose deadline has passed; the next ``init()`` goes on with them."""


def start_and_synchronize(startup: StartupDeadline) -> None:
    """Start MPI, wait for all ranks and check that their settings agree; collective.

    Raises:
        WaitTimeoutError: A rank has not arrived by the deadline. While MPI itself waits for a
            process nothing can be raised: then this process ends with the same message.
        MismatchError: On all ranks, if a setting that they must share differs.
    """
    with ExitStack() as waiting:
        presence = None
        if startup.size > 1:
            presence = InitArrivalTracker.from_environment(startup.rank, os.environ)
        if presence is not None:
            startup.arrival_tracker = waiting.enter_context(presence)
        _initialize_with_deadline(startup)
        _barrier_with_deadline(startup)
    _check_settings(startup)


def _initialize_with_deadline(startup: StartupDeadline) -> None:
    """Initialize MPI while a thread watches the deadline."""
    if MPI.Is_initialized():
        return
    started = threading.Event()

    def watch() -> None:
        while not started.wait(min(0.1, startup.config.timeout)):
            error = startup.check()
            if error is not None and not started.is_set():
                startup.end_process(error)

    thread = threading.Thread(target=watch, name="asyncddp-init", daemon=True)
    thread.start()
    try:
        initialize_mpi()
    finally:
        started.set()
        thread.join()


def _barrier_with_deadline(startup: StartupDeadline) -> None:
    request = _pending_barriers.pop() if _pending_barriers else MPI.COMM_WORLD.Ibarrier()
    attempt = 0
    while not request.Test():
        error = startup.check()
        if error is not None:
            _pending_barriers.append(request)
            raise error
        attempt += 1
        time.sleep(0.0 if attempt < 1000 else _POLL_SECONDS)


def _check_settings(startup: StartupDeadline) -> None:
    """Compare the settings that must be the same on all ranks."""
    comm, config = MPI.COMM_WORLD, startup.config
    algorithm = iallreduce_algorithm()
    mine = {
        "the version of asyncddp": asyncddp.__version__,
        "ASYNCDDP_TRANSPORT": config.transport or DEFAULT_TRANSPORT,
        "ASYNCDDP_DEVICE_WIRES": config.device_wires,
        "ASYNCDDP_RANKS_PER_MACHINE": config.ranks_per_machine,
        "ASYNCDDP_CHECK": config.check,
        f"OMPI_MCA_{ALGORITHM}": algorithm,
    }
    packed = json.dumps(mine).encode()[:_SETTINGS_BYTES].ljust(_SETTINGS_BYTES)
    every = np.empty(comm.size * _SETTINGS_BYTES, dtype=np.uint8)
    comm.Allgather(np.frombuffer(packed, dtype=np.uint8), every)
    texts = [
        bytes(every[r * _SETTINGS_BYTES : (r + 1) * _SETTINGS_BYTES]) for r in range(comm.size)
    ]
    if len(set(texts)) > 1:
        _raise_mismatch(comm.rank, [json.loads(text) for text in texts])
    select_iallreduce_algorithm({algorithm})


def _raise_mismatch(rank: int, every: Sequence[dict[str, Any]]) -> None:
    """Raise for the first setting that differs from rank 0's."""
    for name, first in every[0].items():
        for other, settings in enumerate(every):
            if settings.get(name) != first:
                raise MismatchError(
                    f"rank {rank}: init(): all ranks need the same settings, but {name} is "
                    f"{first!r} on rank 0 and {settings.get(name)!r} on rank {other}; set it alike "
                    "for all ranks, as asyncddp run and the -x of mpirun do"
                )
