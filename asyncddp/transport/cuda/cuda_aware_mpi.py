"""``mpi_cuda``: transport that sends messages between GPUs by a CUDA-aware MPI library.

Only messages use GPU memory: Open MPI does not take it in non-blocking collectives, which are
staged. Not run on a GPU yet; tests run it over a real MPI library with buffers on the host.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from asyncddp.config import read_variable
from asyncddp.device.cuda_streams import CudaArrayView
from asyncddp.device.stream_interfaces import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import EnvironmentProblem, PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, ranks_without
from asyncddp.transport.cuda.pending_requests import PendingRequest
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport

if TYPE_CHECKING:
    from mpi4py import MPI

_PIECE = 1 << 30  # bytes in one MPI message: counts are C ints
_LIBRARIES = "libmpi", "libpmpi", "libmpich", "libmpi_cray"
_DISABLING_VARIABLES = (
    "MPICH_GPU_SUPPORT_ENABLED",  # Cray's MPICH
    "MPIR_CVAR_ENABLE_GPU",  # MPICH
    "MV2_USE_CUDA",  # MVAPICH2
    "I_MPI_OFFLOAD",  # Intel MPI
)
"""Environment variables that disable GPU memory in an MPI library if set to 0."""


class _CudaAwareMPIRequest(PendingRequest):
    """Request of an MPI send or receive of GPU memory, started after earlier work on the GPU."""

    def __init__(
        self, start: Callable[[], list[MPI.Request]], ready: DeviceEvent, drive: Callable[[], None]
    ) -> None:
        super().__init__("message", drive)  # they start in the order in which they were called for
        self._start, self._ready = start, ready
        self._requests: list[MPI.Request] | None = None

    def advance(self, *, first: bool) -> None:
        """Start the MPI requests once the device is ready, and test them from then on."""
        what = "could not be started"
        try:
            if first and self._requests is None and self._ready.done():
                self._requests = self._start()
            if self._requests is not None:
                self.next_may_start, what = True, "failed"
                self.over = _mpi().Request.Testall(self._requests)
        except RuntimeError as error:  # of MPI, or of the device
            self._problem = PeerError(f"a message between GPUs {what}: {error}")
            self.next_may_start = self.over = True

    def abandon(self) -> None:
        """Do nothing: the message is sent nevertheless, since its receiver relies on it."""


class _CudaMPIReceiveRequest(_CudaAwareMPIRequest):
    """Request of an MPI receive into GPU memory, which can be cancelled."""

    def abandon(self) -> None:
        """Cancel the receive; the tensor is kept as long as MPI uses it."""
        self._requests = self._requests or []
        for request in self._requests:
            if request != _mpi().REQUEST_NULL:
                request.Cancel()


class CudaAwareMPITransport(CudaStagedTransport):
    """Transport of GPU messages by CUDA-aware MPI; collectives are staged through host memory.

    It has its own communicator, and waits for a tensor's stream by an event, never for the whole
    device.

    References:
        Open MPI's FAQ, "Which MPI APIs work with CUDA-aware?"
    """

    name = "mpi_cuda"
    first_between_machines = True

    def __init__(self, base: Transport, streams: DeviceStreams, comm: MPI.Intracomm) -> None:
        super().__init__(base, streams)
        self._comm = comm
        self._comm.Set_errhandler(_mpi().ERRORS_RETURN)

    @staticmethod
    def detect(facts: DeviceCapabilities) -> DeviceCapabilities:
        """Query whether the MPI library accepts GPU memory."""
        return replace(facts, mpi_cuda=query_cuda_support())

    @staticmethod
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        """Return an obstacle unless both MPI libraries report that they accept GPU memory."""
        where = ranks_without(lambda facts: facts.mpi_cuda is True, one, other)
        return where and f"the MPI library of {where} does not say that it takes GPU memory"

    @classmethod
    def open(
        cls, base: Transport, streams: DeviceStreams, reachable: Collection[int], timeout: float
    ) -> CudaAwareMPITransport:
        """Open the transport between all ranks of the job, with its own communicator."""
        if not base.started_by_mpi:
            raise EnvironmentProblem(f"the ranks are connected by {base.name}, not by MPI")
        return cls(base, streams, _mpi().COMM_WORLD.Dup())

    def for_device(self, streams: DeviceStreams) -> CudaAwareMPITransport:
        """Make the same transport for another device of this rank."""
        return CudaAwareMPITransport(self.base, streams, self._comm)

    def close(self) -> None:
        """Drop staged requests; messages keep their tensors, which MPI may still use."""
        messages = [
            request for request in self._requests if isinstance(request, _CudaAwareMPIRequest)
        ]
        super().close()
        self._requests.extend(messages)

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to send directly from the tensor's memory."""
        return self._begin(
            data, lambda piece: self._comm.Isend(piece, peer, tag), _CudaAwareMPIRequest
        )

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Start to receive directly into the tensor's memory."""
        return self._begin(
            out, lambda piece: self._comm.Irecv(piece, peer, tag), _CudaMPIReceiveRequest
        )

    def _begin(
        self,
        tensor: torch.Tensor,
        start: Callable[[Any], MPI.Request],
        kind: type[_CudaAwareMPIRequest],
    ) -> Request:
        """Make a request for all pieces, started after earlier work on the compute stream."""
        parts = torch.split(as_bytes(tensor), _PIECE)
        pieces = [CudaArrayView(part.data_ptr(), part.numel(), part) for part in parts]
        ready, drive = self.streams.record_event(StreamRole.COMPUTE), self._requests.advance
        message = kind(lambda: [start([piece, _mpi().BYTE]) for piece in pieces], ready, drive)
        self._requests.append(message)
        drive()
        return message


def _mpi() -> ModuleType:
    """Import mpi4py's module ``MPI`` on first use, since ranks may run without MPI."""
    from asyncddp.transport.mpi.runtime import MPI

    return MPI


def query_cuda_support(environment: Mapping[str, str] | None = None) -> bool | None:
    """Query whether the MPI library accepts GPU memory; None if it does not report it.

    An environment variable of the library that disables it takes precedence. Open MPI built without
    CUDA reports False. UCX, if it sends the messages and has loaded its CUDA module, may accept GPU
    memory nevertheless; that is assumed if the user asks for ``mpi_cuda`` by name.

    Example:
        >>> query_cuda_support({"MPICH_GPU_SUPPORT_ENABLED": "0"})
        False
    """

    def text_of(name: str) -> str:
        return read_variable(name, str, environment) or ""

    if any(text_of(name) == "0" for name in _DISABLING_VARIABLES):
        return False
    asked = "mpi_cuda" in text_of("ASYNCDDP_DEVICE_TRANSPORTS")
    if asked and text_of("OMPI_MCA_pml") == "ucx" and _loaded("libuct_cuda"):
        return True
    answers = [_query_library(ctypes.CDLL(path)) for path in _loaded(*_LIBRARIES)]
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _loaded(*names: str) -> list[str]:
    """Return the paths of loaded shared libraries whose names begin with one of ``names``."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(rf"\S+/(?:{'|'.join(names)})[^/\s]*\.so\S*", maps)))


def _query_library(library: Any) -> bool | None:
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        found = ctypes.c_int(0)
        library.MPIX_GPU_query_support(0, ctypes.byref(found))  # 0 is MPIX_GPU_SUPPORT_CUDA
        return bool(found.value)
    return None
