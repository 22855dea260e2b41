"""MPI startup in ``init()``: initializes MPI, waits for all ranks, and compares settings."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from asyncddp.transport import DEFAULT_TRANSPORT
from asyncddp.transport.mpi.communicator_pair import allgather_records
from asyncddp.transport.mpi.iallreduce_tuning import ALGORITHM, DEFAULT, iallreduce_algorithm
from asyncddp.transport.mpi.runtime import MPI, initialize_mpi
from asyncddp.transport.startup_deadline import (
    InitArrivalTracker,
    Settings,
    StartupDeadline,
    check_settings,
    shared_settings,
)

_POLL_SECONDS = 0.02  # seconds
_pending_barriers: list[MPI.Request] = []
"""Barriers whose deadline has passed; the next ``init()`` goes on with them."""


def start_and_synchronize(startup: StartupDeadline) -> None:
    """Start MPI, wait for all ranks and check that their settings agree; collective.

    A rank that is late is a WaitTimeoutError; while MPI itself waits for a process nothing can be
    raised, and this process ends with the same message. Different settings are a MismatchError.
    """
    tracker = InitArrivalTracker.from_environment(startup.rank)
    with ExitStack() as waiting:
        if tracker is not None and startup.size > 1:
            startup.arrival_tracker = waiting.enter_context(tracker)
        _initialize_with_deadline(startup)
        _barrier_with_deadline(startup)
    _check_settings(startup)


def _initialize_with_deadline(startup: StartupDeadline) -> None:
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
    """Raise an error for the first setting that differs from rank 0's, or tune MPI."""
    config, algorithm = startup.config, iallreduce_algorithm()
    mine = shared_settings(config, DEFAULT_TRANSPORT) | {f"OMPI_MCA_{ALGORITHM}": algorithm}
    check_settings(MPI.COMM_WORLD.rank, allgather_records(MPI.COMM_WORLD, mine, Settings))
    if algorithm == DEFAULT:  # on all ranks
        iallreduce_algorithm(change=True)
