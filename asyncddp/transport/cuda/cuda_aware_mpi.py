"""``mpi_cuda``: transport of messages between GPUs by a CUDA-aware MPI library.

Only messages use GPU memory: Open MPI takes it in sends, receives and blocking collectives,
and not in the non-blocking collectives that we use, which are staged as in ``cuda_staged``. Not run
on a GPU yet; tests run it over a real MPI library with buffers that lie on the host.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from asyncddp.device.cuda_streams import CudaArrayView
from asyncddp.device.streams import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, ranks_without
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from asyncddp.transport.mpi.runtime import MPI

_PIECE = 1 << 30  # bytes in one MPI message: counts are C ints
_DISABLING_VARIABLES = {
    "MPICH_GPU_SUPPORT_ENABLED": "Cray's MPICH",
    "MPIR_CVAR_ENABLE_GPU": "MPICH",
    "MV2_USE_CUDA": "MVAPICH2",
    "I_MPI_OFFLOAD": "Intel MPI",
}
"""Variables which, set to 0, have a library not take GPU memory though it could."""


class _CudaMPIRequest:
    """MPI send or receive of GPU memory that starts once earlier work on the GPU has ended."""

    def __init__(
        self, start: Callable[[], list[MPI.Request]], ready: DeviceEvent, drive: Callable[[], None]
    ) -> None:
        self._start, self._ready, self._drive = start, ready, drive
        self._requests: list[MPI.Request] | None = None
        self._problem: PeerError | None = None

    def ready(self) -> bool:
        """Start the MPI requests once the device is ready; return whether they have started."""
        if self._requests is None and self._ready.done():
            try:
                self._requests = self._start()
            except MPI.Exception as error:
                self._requests, self._problem = (
                    [],
                    PeerError(f"a message between GPUs could not be started: {error}"),
                )
        return self._requests is not None

    def done(self) -> bool:
        self._drive()
        ended = self.ended()
        if self._problem is not None:
            raise self._problem
        return ended

    def ended(self) -> bool:
        """Return whether MPI no longer uses the tensor, after success or an error."""
        if self._requests is None or self._problem is not None:
            return self._problem is not None
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            self._problem = PeerError(f"a message between GPUs failed: {error}")
            return True

    def abandon(self) -> None:
        """Do nothing: the message is sent all the same, since its receiver counts on it."""


class _CudaMPIReceiveRequest(_CudaMPIRequest):
    """An MPI receive into GPU memory, which can be cancelled."""

    def abandon(self) -> None:
        """Cancel the receive; the tensor is kept until MPI no longer uses it."""
        if self._requests is None:
            self._requests = []
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()


class CudaAwareMPITransport(CudaStagedTransport):
    """Transport of GPU tensors by CUDA-aware MPI; collectives go through pinned host memory.

    It has a communicator of its own, and waits for the stream on which a tensor is made by an
    event, never for the whole device.

    References:
        Open MPI's FAQ, "Which MPI APIs work with CUDA-aware?"
    """

    name = "mpi_cuda"
    first_between_machines = True

    def __init__(self, base: Transport, streams: DeviceStreams, comm: MPI.Intracomm) -> None:
        super().__init__(base, streams)
        self._comm = comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._messages: list[_CudaMPIRequest] = []

    @staticmethod
    def detect(facts: DeviceCapabilities) -> DeviceCapabilities:
        """Query whether the MPI library takes GPU memory."""
        return replace(facts, mpi_cuda=query_cuda_support())

    @staticmethod
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        """Refuse MPI libraries that do not say that they take GPU memory."""
        where = ranks_without(lambda facts: facts.mpi_cuda is True, one, other)
        return (
            f"the MPI library of {where} does not say that it takes GPU memory" if where else None
        )

    @classmethod
    def open(
        cls,
        base: Transport,
        streams: DeviceStreams,
        reachable: Collection[int] = (),
        timeout: float = 0.0,
    ) -> CudaAwareMPITransport:
        """Open the transport between all ranks of the job, with a communicator of its own."""
        del reachable, timeout
        return cls(base, streams, MPI.COMM_WORLD.Dup())

    def for_device(self, streams: DeviceStreams) -> CudaAwareMPITransport:
        """Make the same transport for another device of this rank."""
        return CudaAwareMPITransport(self.base, streams, self._comm)

    def split(self, color: int, key: int) -> Transport:
        """Split the MPI communicator."""
        part = cast("MPI.Intracomm", self._comm.Split(color, key))
        return CudaAwareMPITransport(self.base.split(color, key), self.streams, part)

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Request:
        """Send directly from the tensor's memory."""
        return self._begin(data, lambda piece: self._comm.Isend(piece, peer, tag), _CudaMPIRequest)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Request:
        """Receive directly into the tensor's memory."""
        return self._begin(
            out, lambda piece: self._comm.Irecv(piece, peer, tag), _CudaMPIReceiveRequest
        )

    def _begin(
        self, tensor: torch.Tensor, start: Callable[[Any], MPI.Request], kind: type[_CudaMPIRequest]
    ) -> Request:
        flat = as_bytes(tensor)
        ranges = range(0, max(1, flat.numel()), _PIECE)
        pieces = [_buffer(flat[first : first + _PIECE]) for first in ranges]

        def all_pieces() -> list[MPI.Request]:
            return [start([piece, MPI.BYTE]) for piece in pieces]

        message = kind(
            all_pieces, self.streams.record_event(StreamRole.COMPUTE), self._drive_messages
        )
        self._messages.append(message)
        self._drive_messages()
        return message

    def _drive_messages(self) -> None:
        """Start the messages that are ready, in order, and drop those that have ended."""
        for message in self._messages:
            if not message.ready():
                break
        self._messages = [message for message in self._messages if not message.ended()]


def _buffer(flat: torch.Tensor) -> CudaArrayView:
    """Make the buffer of a flat uint8 tensor; the transport waits for its work by event."""
    return CudaArrayView(flat.data_ptr() if flat.numel() else 0, flat.numel(), flat)


def query_cuda_support(environment: Mapping[str, str] | None = None) -> bool | None:
    """Query whether the MPI library takes GPU memory; None if it does not say.

    Open MPI and its kin are asked by ``MPIX_Query_cuda_support``, MPICH and its kin by
    ``MPIX_GPU_query_support``; an environment variable of theirs that turns it off wins.

    Example:
        >>> query_cuda_support({"MPICH_GPU_SUPPORT_ENABLED": "0"})
        False
    """
    environment = os.environ if environment is None else environment
    if any(environment.get(name) == "0" for name in _DISABLING_VARIABLES):
        return False
    answers = [_query_library(ctypes.CDLL(path)) for path in _loaded_mpi_libraries()]
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _loaded_mpi_libraries() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"\S+/lib(?:p?mpi|mpich|mpi_cray)[^/\s]*\.so\S*", maps)))


def _query_library(library: Any) -> bool | None:
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        found = ctypes.c_int(0)
        library.MPIX_GPU_query_support(0, ctypes.byref(found))  # 0 is MPIX_GPU_SUPPORT_CUDA
        return bool(found.value)
    return None
