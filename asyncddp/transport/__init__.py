"""How ranks talk: one wire, one file, behind the contract of :mod:`asyncddp.transport.contract`."""

from __future__ import annotations

from asyncddp.registry import Registry
from asyncddp.transport.contract import Transfer, Transport

__all__ = ["TRANSPORTS", "Transfer", "Transport"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    {
        "loopback": "asyncddp.transport.loopback:Loopback",
        "mpi": "asyncddp.transport.mpi:MPITransport",
        "shared_memory": "asyncddp.transport.shared_memory:SharedMemoryTransport",
    },
    group="asyncddp.transports",
)
