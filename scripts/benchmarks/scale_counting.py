"""Counts what a rank sends: at the library's transport, and inside Open MPI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asyncddp.transport import Transfer, Transport

__all__ = ["MONITORING", "AtTransport", "Count", "InsideMPI", "NotCounted"]

MONITORING = {"OMPI_MCA_pml_monitoring_enable": "1"}
"""What lets Open MPI count the messages between its ranks, of collectives as well."""


@dataclass(frozen=True)
class Count:
    """What was sent so far.

    Attributes:
        messages: Messages, headers among them.
        headers: Short messages that carry no tensor.
        nbytes: Bytes of all of them.
    """

    messages: int
    headers: int
    nbytes: int

    def __sub__(self, other: Count) -> Count:
        return Count(
            self.messages - other.messages,
            self.headers - other.headers,
            self.nbytes - other.nbytes,
        )


class AtTransport:
    """Counts what goes through ``post`` and ``isend`` of one transport from now on.

    What a collective sends is the wire's affair, and not seen here.
    """

    def __init__(self, wire: Transport) -> None:
        self._headers = self._tensors = self._bytes = 0
        post, isend = wire.post, wire.isend

        def counted_post(peer: int, message: bytes) -> None:
            self._headers += 1
            self._bytes += len(message)
            post(peer, message)

        def counted_isend(data: torch.Tensor, peer: int, tag: int) -> Transfer:
            self._tensors += 1
            self._bytes += data.nbytes
            return isend(data, peer, tag)

        # Around this one object's methods: the class, and other ranks' wires, stay as they are.
        wire.post = counted_post  # type: ignore[method-assign]
        wire.isend = counted_isend  # type: ignore[method-assign]

    def read(self) -> Count:
        """What was sent since this was made."""
        return Count(self._headers + self._tensors, self._headers, self._bytes)


class NotCounted(RuntimeError):  # noqa: N818 - it is a finding, not a mistake
    """This MPI library does not count messages."""


class InsideMPI:
    """Open MPI's own count of what this rank sends to others (its component ``monitoring``).

    It sees every message between ranks, those of collectives too, whoever sends it.

    Raises:
        NotCounted: The library is no Open MPI, or was started without :data:`MONITORING`.
    """

    _SIZE_CLASS = 2  # MPI_T_PVAR_CLASS_SIZE in Open MPI's mpi.h

    def __init__(self) -> None:
        from mpi4py import MPI

        if MPI.get_vendor()[0] != "Open MPI":
            raise NotCounted(f"{MPI.get_vendor()[0]} does not count messages; Open MPI does")
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
            raise NotCounted(f"{name} failed: Open MPI was started without its monitoring")

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

    def read(self) -> Count:
        """What was sent so far; headers are not told apart."""
        return Count(self._messages(), 0, self._bytes())
