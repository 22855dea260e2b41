"""How ranks talk: one wire, one file, behind the contract of :mod:`asyncddp.transport.contract`."""

from __future__ import annotations

from asyncddp.registry import Registry
from asyncddp.transport.contract import Transfer, Transport

__all__ = ["DEVICE_WIRES", "TRANSPORTS", "Transfer", "Transport"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    {
        "loopback": "asyncddp.transport.loopback:Loopback",
        "mpi": "asyncddp.transport.mpi:MPITransport",
        "shared_memory": "asyncddp.transport.shared_memory:SharedMemoryTransport",
    },
    group="asyncddp.transports",
)

DEVICE_WIRES: Registry[type[Transport]] = Registry(
    "wire for tensors on devices",
    {
        "cuda_ipc": "asyncddp.transport.cuda_ipc:CudaIPC",
        "cuda_staged": "asyncddp.transport.cuda_staged:CudaStaged",
        "mpi_cuda": "asyncddp.transport.mpi_cuda:MPICuda",
        "nccl": "asyncddp.transport.nccl:NCCL",
    },
    group="asyncddp.device_wires",
)
