"""Transports: MPI, shared memory, loopback and CUDA ones behind one base class, and registries."""

from __future__ import annotations

from asyncddp.registry import Registry
from asyncddp.transport.base import Request, Transport

__all__ = ["DEVICE_TRANSPORTS", "TRANSPORTS", "Request", "Transport"]

TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport",
    {
        "loopback": "asyncddp.transport.loopback:LoopbackTransport",
        "mpi": "asyncddp.transport.mpi.mpi_transport:MPITransport",
        "shared_memory": (
            "asyncddp.transport.shared_memory.shared_memory_transport:SharedMemoryTransport"
        ),
    },
    group="asyncddp.transports",
)

DEVICE_TRANSPORTS: Registry[type[Transport]] = Registry(
    "transport for device tensors",
    {
        "cuda_ipc": "asyncddp.transport.cuda.ipc.ipc_transport:CudaIPCTransport",
        "cuda_staged": "asyncddp.transport.cuda.staged_transport:CudaStagedTransport",
        "mpi_cuda": "asyncddp.transport.cuda.cuda_aware_mpi:CudaAwareMPITransport",
        "nccl": "asyncddp.transport.cuda.nccl.nccl_transport:NCCLTransport",
    },
    group="asyncddp.device_wires",
)
