"""Worker process of a pool of ranks: runs test cases until it is told to exit."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Client

from asyncddp.environments.launchers import launcher_rank_and_size
from asyncddp.testing.outcome import Outcome
from asyncddp.testing.rank_function_call import run_case
from asyncddp.transport import TRANSPORTS


def main(address: str, transport: str) -> None:
    """Connect to the pool at ``address`` and run its cases."""
    _print_stacks_on_signals()
    rank = _start(transport)
    with Client(address, family="AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((rank, os.getpid())))
        while (case := pickle.loads(connection.recv_bytes())) is not None:
            connection.send_bytes(_pickle_outcome(run_case(rank, case)))
            _print_stacks_on_signals()  # a case may have set handlers, as Lightning's Trainer does


def _print_stacks_on_signals() -> None:
    """Print the main thread's stack on SIGUSR1, and all threads' stacks on SIGUSR2."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        faulthandler.unregister(number)  # else it would not notice that another handler was set
        every = number == signal.SIGUSR2  # which may crash where threads are running
        faulthandler.register(number, all_threads=every)


def _start(transport: str) -> int:
    """Initialize MPI if it provides the ranks; return this rank."""
    if not TRANSPORTS[transport].started_by_mpi:
        return launcher_rank_and_size()[0]
    from asyncddp.transport.mpi.runtime import MPI, initialize_mpi

    initialize_mpi()
    return int(MPI.COMM_WORLD.rank)


def _pickle_outcome(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except (TypeError, AttributeError, pickle.PicklingError) as problem:
        return pickle.dumps(Outcome.of(outcome.rank, outcome.seconds, problem))


if __name__ == "__main__":
    main(*sys.argv[1:])
