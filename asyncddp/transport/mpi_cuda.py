"""``mpi_cuda``: messages out of GPU memory into GPU memory, by an MPI library that takes both.

Only messages go that way. Open MPI takes GPU memory in sends, receives and blocking collectives,
and not in the non-blocking collectives that we use, which are staged as in ``cuda_staged``. Not run
on a GPU yet; tests run it over a real MPI library with buffers that lie on the host.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.cuda_staged import CudaStaged
from asyncddp.transport.mpi_library import MPI

__all__ = ["DeviceBytes", "MPICuda", "says_cuda"]

_PIECE = 1 << 30  # bytes in one MPI message: counts are C ints
_OFF = {
    "MPICH_GPU_SUPPORT_ENABLED": "Cray's MPICH",
    "MPIR_CVAR_ENABLE_GPU": "MPICH",
    "MV2_USE_CUDA": "MVAPICH2",
    "I_MPI_OFFLOAD": "Intel MPI",
}
"""Variables which, set to 0, have a library not take GPU memory though it could."""


class DeviceBytes:
    """Bytes of device memory as MPI for Python takes them.

    The interface says nothing of streams (version 2), so that nobody waits for any: the wire has
    done that by event.

    Args:
        flat: A flat uint8 tensor.

    Example:
        >>> buffer = DeviceBytes(torch.zeros(5, dtype=torch.uint8))
        >>> buffer.__cuda_array_interface__["shape"], buffer.__cuda_array_interface__["typestr"]
        ((5,), '|u1')

    References:
        "CUDA Array Interface (Version 3)", Numba's documentation; "Support for GPU-aware MPI", the
        documentation of MPI for Python.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self.__cuda_array_interface__ = {
            "shape": (flat.numel(),),
            "typestr": "|u1",
            "data": (flat.data_ptr() if flat.numel() else 0, False),
            "version": 2,
        }


class _Message:
    """A message out of or into a tensor: started once the device has done what comes before."""

    def __init__(
        self, start: Callable[[], list[MPI.Request]], ready: Event, drive: Callable[[], None]
    ) -> None:
        self._start, self._ready, self._drive = start, ready, drive
        self._requests: list[MPI.Request] | None = None
        self._problem: PeerError | None = None

    def ready(self) -> bool:
        """Whether it has been started, or has been now."""
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
        """Whether MPI is through with the tensor, and it went well."""
        self._drive()
        ended = self.over()
        if self._problem is not None:
            raise self._problem
        return ended

    def over(self) -> bool:
        """Whether MPI is through with the tensor, well or not."""
        if self._requests is None or self._problem is not None:
            return self._problem is not None
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            self._problem = PeerError(f"a message between GPUs failed: {error}")
            return True

    def abandon(self) -> None:
        """Give it up; it leaves all the same, since its receiver counts on it."""


class _Arriving(_Message):
    """A receive, which MPI can cancel."""

    def abandon(self) -> None:
        """Give it up; the tensor is kept until MPI is through with it."""
        if self._requests is None:
            self._requests = []
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()


class MPICuda(CudaStaged):
    """A wire for tensors on a GPU over MPI.

    The stream on which a tensor is made is waited for by an event, never the whole device.

    Args:
        base: The wire for tensors on the host, between the same ranks.
        streams: Of the device.
        comm: A communicator of its own between the same ranks.

    References:
        Open MPI's FAQ, "Which MPI APIs work with CUDA-aware?"
    """

    name = "mpi_cuda"

    def __init__(self, base: Transport, streams: DeviceStreams, comm: MPI.Intracomm) -> None:
        super().__init__(base, streams)
        self._comm = comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._messages: list[_Message] = []

    @classmethod
    def open(cls, base: Transport, streams: DeviceStreams) -> MPICuda:
        """Make the wire of all ranks; collective.

        Args:
            base: The wire between all ranks of the job.
            streams: Of the device.
        """
        return cls(base, streams, MPI.COMM_WORLD.Dup())

    def for_device(self, streams: DeviceStreams) -> MPICuda:
        """The same wire for another device of this rank."""
        return MPICuda(self.base, streams, self._comm)

    def split(self, color: int, key: int) -> Transport:
        """Split the communicator."""
        part = cast("MPI.Intracomm", self._comm.Split(color, key))
        return MPICuda(self.base.split(color, key), self.streams, part)

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Send where it lies."""
        return self._begin(data, lambda piece: self._comm.Isend(piece, peer, tag), _Message)

    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Receive where it is to lie."""
        return self._begin(out, lambda piece: self._comm.Irecv(piece, peer, tag), _Arriving)

    def _begin(
        self,
        tensor: torch.Tensor,
        start: Callable[[Any], MPI.Request],
        kind: type[_Message],
    ) -> Transfer:
        flat = as_bytes(tensor)
        ranges = range(0, max(1, flat.numel()), _PIECE)
        pieces = [DeviceBytes(flat[first : first + _PIECE]) for first in ranges]

        def all_pieces() -> list[MPI.Request]:
            """Start all pieces at once."""
            return [start([piece, MPI.BYTE]) for piece in pieces]

        message = kind(all_pieces, self.streams.mark(Queue.WORK), self._drive_messages)
        self._messages.append(message)
        self._drive_messages()
        return message

    def _drive_messages(self) -> None:
        """Start what may be started, in order; forget what has ended."""
        for message in self._messages:
            if not message.ready():
                break
        self._messages = [message for message in self._messages if not message.over()]


def says_cuda(environment: Mapping[str, str] | None = None) -> bool | None:
    """Whether the MPI library says that it takes GPU memory; None if it says nothing.

    Open MPI and its kin are asked by ``MPIX_Query_cuda_support``, MPICH and its kin by
    ``MPIX_GPU_query_support``; a variable of theirs that turns it off wins.

    Args:
        environment: Variables; those of this process if not given.

    Example:
        >>> says_cuda({"MPICH_GPU_SUPPORT_ENABLED": "0"})
        False
    """
    environment = os.environ if environment is None else environment
    if any(environment.get(name) == "0" for name in _OFF):
        return False
    answers = [_asked(ctypes.CDLL(path)) for path in _libraries()]
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _libraries() -> list[str]:
    """The MPI libraries that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"\S+/lib(?:p?mpi|mpich|mpi_cray)[^/\s]*\.so\S*", maps)))


def _asked(library: Any) -> bool | None:
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        found = ctypes.c_int(0)
        library.MPIX_GPU_query_support(0, ctypes.byref(found))  # 0 is MPIX_GPU_SUPPORT_CUDA
        return bool(found.value)
    return None
