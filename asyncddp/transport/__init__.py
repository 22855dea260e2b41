"""Transports (MPI, shared memory, loopback, CUDA) with a common base class, and their registries.

Here belongs how bytes travel; ``mpi4py`` and ``cupy`` are imported here and nowhere else. The
engine calls it, and ``context`` chooses. A transport declares its scope and condition, never blocks
without a deadline, and never unpickles what came from a peer.
"""

from __future__ import annotations

from asyncddp.registry import PluginRegistry
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.device_transport import DeviceTransport

__all__ = ["DEVICE_TRANSPORTS", "TRANSPORTS", "Request", "Transport"]

TRANSPORTS: PluginRegistry[type[Transport]] = PluginRegistry(
    "transport",
    {
        "c10d": "asyncddp.transport.sockets.socket_transport:SocketTransport",
        "loopback": "asyncddp.transport.loopback:LoopbackTransport",
        "mpi": "asyncddp.transport.mpi.mpi_transport:MPITransport",
        "shared_memory": ("asyncddp.transport.mpi.shared_memory_transport:SharedMemoryTransport"),
    },
    group="asyncddp.transports",
)

DEFAULT_TRANSPORT = "shared_memory"
"""Name of the transport where the user names none, and ranks are started by MPI."""

C10D = "c10d"
"""Name of the transport where ranks are started by a launcher of torch.distributed."""

_PREFERRED = {
    "cuda_ipc": "asyncddp.transport.cuda.ipc.ipc_transport:CudaIPCTransport",
    "nccl": "asyncddp.transport.cuda.nccl.nccl_transport:NCCLTransport",
    "mpi_cuda": "asyncddp.transport.cuda.cuda_aware_mpi:CudaAwareMPITransport",
}

DEVICE_TRANSPORTS: PluginRegistry[type[DeviceTransport]] = PluginRegistry(
    "transport for device tensors",
    {"cuda_staged": "asyncddp.transport.cuda.staged_transport:CudaStagedTransport", **_PREFERRED},
    group="asyncddp.device_transports",
)

DEFAULT_DEVICE_TRANSPORTS = ("cuda_ipc", "nccl")
"""Names of the transports that are tried where the user names none, and every rank sees a GPU."""

PREFERRED_DEVICE_TRANSPORTS = tuple(_PREFERRED)
"""Names of the transports for which ``ASYNCDDP_DEVICE_TRANSPORTS=auto`` stands, the best first."""
