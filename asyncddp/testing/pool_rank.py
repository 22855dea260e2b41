"""One rank of a pool: performs the cases that it is sent, until there are no more."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Client

from asyncddp.testing.case import perform
from asyncddp.testing.outcome import Outcome
from asyncddp.transport.mpi_library import MPI, start_mpi

__all__ = ["main"]


def main(address: str) -> None:
    """Serve the pool that listens at ``address``."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    start_mpi()
    rank = MPI.COMM_WORLD.rank
    with Client(address, family="AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((rank, os.getpid())))
        while (case := pickle.loads(connection.recv_bytes())) is not None:
            connection.send_bytes(_packed(perform(rank, case)))


def _packed(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except (TypeError, AttributeError, pickle.PicklingError) as problem:
        return pickle.dumps(Outcome.of(outcome.rank, outcome.seconds, problem))


if __name__ == "__main__":
    main(sys.argv[1])
