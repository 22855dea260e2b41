"""Counters of the messages that a rank sends: at the transport, and inside Open MPI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asyncddp.transport import Request, Transport

__all__ = [
    "MONITORING",
    "CounterUnavailableError",
    "MessageCount",
    "OpenMpiCounter",
    "TransportCounter",
]

MONITORING = {"OMPI_MCA_pml_monitoring_enable": "1"}
"""Environment variables by which Open MPI counts messages, those of collectives too."""


@dataclass(frozen=True)
class MessageCount:
    """Number of messages and bytes sent so far.

    Attributes:
        messages: Messages, headers among them.
        headers: Short messages that carry no tensor.
        nbytes: Bytes of all of them.
    """

    messages: int
    headers: int
    nbytes: int

    def __sub__(self, other: MessageCount) -> MessageCount:
        return MessageCount(
            self.messages - other.messages,
            self.headers - other.headers,
            self.nbytes - other.nbytes,
        )


class TransportCounter:
    """Counter of the messages that go through ``post`` and ``isend`` of one transport.

    What a collective sends is the transport's affair, and not seen here.
    """

    def __init__(self, transport: Transport) -> None:
        self._headers = self._tensors = self._bytes = 0
        post, isend = transport.post, transport.isend

        def counted_post(peer: int, message: bytes) -> None:
            self._headers += 1
            self._bytes += len(message)
            post(peer, message)

        def counted_isend(data: torch.Tensor, peer: int, tag: int) -> Request:
            self._tensors += 1
            self._bytes += data.nbytes
            return isend(data, peer, tag)

        # Around this one object's methods: its class, and other ranks' transports, stay as is.
        transport.post = counted_post  # type: ignore[method-assign]
        transport.isend = counted_isend  # type: ignore[method-assign]

    def read(self) -> MessageCount:
        """Return the count since the counter was created."""
        return MessageCount(self._headers + self._tensors, self._headers, self._bytes)


class CounterUnavailableError(RuntimeError):
    """Error of an MPI library that does not count messages."""


class OpenMpiCounter:
    """Counter of this rank's messages inside Open MPI (its component ``monitoring``).

    It sees every message between ranks, those of collectives too, whoever sends it.

    Raises:
        CounterUnavailableError: The library is not Open MPI, or runs without :data:`MONITORING`.
    """

    _SIZE_CLASS = 2  # MPI_T_PVAR_CLASS_SIZE in Open MPI's mpi.h

    def __init__(self) -> None:
        from mpi4py import MPI

        if MPI.get_vendor()[0] != "Open MPI":
            raise CounterUnavailableError(
                f"{MPI.get_vendor()[0]} does not count messages; Open MPI does"
            )
        self._library = ctypes.CDLL("libmpi.so.40")  # loaded already, by mpi4py
        self._session = ctypes.c_void_p()
        level = ctypes.c_int()
        asked = MPI.Query_thread()  # another level would change what MPI says of itself
        self._call("MPI_T_init_thread", asked, ctypes.byref(level))
        self._call("MPI_T_pvar_session_create", ctypes.byref(self._session))
        world = ctypes.c_void_p(MPI._addressof(MPI.COMM_WORLD))
        self._messages = self._variable(b"pml_monitoring_messages_count", world)
        self._bytes = self._variable(b"pml_monitoring_messages_size", world)

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments) != 0:
            raise CounterUnavailableError(
                f"{name} failed: Open MPI was started without its monitoring"
            )

    def _variable(self, name: bytes, world: ctypes.c_void_p) -> Callable[[], int]:
        """A function that reads one performance variable, the sum over all peers."""
        index, length, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("MPI_T_pvar_get_index", name, self._SIZE_CLASS, ctypes.byref(index))
        places = (ctypes.byref(handle), ctypes.byref(length))
        self._call("MPI_T_pvar_handle_alloc", self._session, index, world, *places)
        self._call("MPI_T_pvar_start", self._session, handle)
        values = (ctypes.c_size_t * length.value)()

        def read() -> int:
            self._call("MPI_T_pvar_read", self._session, handle, values)
            return sum(values)

        return read

    def read(self) -> MessageCount:
        """Return the count so far; headers are not counted apart."""
        return MessageCount(self._messages(), 0, self._bytes())
