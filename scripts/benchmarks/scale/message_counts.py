"""Messages that each verb sends: counted at the transport, and inside Open MPI."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.transport import Request, Transport

ONE_PEER, ALLREDUCE = "one-peer", "allreduce"
GRAPHS: dict[str, Callable[[int], topology.GraphOrSchedule]] = {
    ONE_PEER: topology.one_peer_exponential,
    "exp-2": topology.exponential_two,
    "ring": topology.ring,
}
MONITORING = {"OMPI_MCA_pml_monitoring_enable": "1"}
"""Environment variables by which Open MPI counts messages, those of collectives too."""
Count = dict[str, int]
"""Messages, of them headers (short ones that carry no tensor), and bytes of all, sent so far."""
Found = dict[str, dict[str, Any]]
"""For each verb what this rank sent by each counter, the sum of all calls."""


def transport_counter(transport: Transport) -> Callable[[], Count]:
    """Count the messages that go through ``post`` and ``isend`` of one transport from now on.

    What a collective sends is the transport's affair, and not seen here.
    """
    post, isend = transport.post, transport.isend
    count = {"messages": 0, "headers": 0, "nbytes": 0}

    def counted_post(peer: int, message: bytes) -> None:
        count["messages"] += 1
        count["headers"] += 1
        count["nbytes"] += len(message)
        post(peer, message)

    def counted_isend(data: torch.Tensor, peer: int, tag: int) -> Request:
        count["messages"] += 1
        count["nbytes"] += data.nbytes
        return isend(data, peer, tag)

    # Around this one object's methods: its class, and other ranks' transports, stay as is.
    transport.post = counted_post  # type: ignore[method-assign]
    transport.isend = counted_isend  # type: ignore[method-assign]
    return lambda: dict(count)


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
        asked = MPI.Query_thread()  # another level would change what MPI says of itself
        self._call("MPI_T_init_thread", asked, ctypes.byref(ctypes.c_int()))
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

    def read(self) -> Count:
        """Return the count so far; headers are not counted apart."""
        return {"messages": self._messages(), "headers": 0, "nbytes": self._bytes()}


def count_verbs(nbytes: int, calls: int, inside: OpenMpiCounter | None = None) -> Found:
    """Run every verb on this rank's part of the current world, and count.

    Args:
        nbytes: Size of the tensor.
        calls: Calls of each verb; in one before them, which is not counted, connections are made.
        inside: Open MPI's counter, where there is one.

    Returns:
        The counts; of allreduce only what MPI has counted, and the headers.

    Raises:
        ValueError: A result is wrong.
    """
    counters = {"transport": transport_counter(bf.current().transport)}
    if inside is not None:
        counters["mpi"] = inside.read
    own = torch.full((nbytes // 4,), float(bf.rank()))

    def counted(call: Callable[[int], torch.Tensor], expected: float) -> dict[str, Any]:
        call(0)
        _settle()
        before = {name: read() for name, read in counters.items()}
        for number in range(1, calls + 1):
            result = call(number)
        after = {name: read() for name, read in counters.items()}
        _settle()
        if not torch.allclose(result, torch.full_like(result, expected)):
            got = result[0].item()
            raise ValueError(f"rank {bf.rank()}: expected {expected}, got {got}")
        found: dict[str, Any] = {"mpi": None}
        for name, count in after.items():
            found[name] = {what: count[what] - before[name][what] for what in count}
        return found

    verbs: Found = {}
    for name, graph in GRAPHS.items():
        schedule = topology.as_schedule(graph(bf.size()))
        bf.set_topology(schedule)
        near = schedule.neighbors(bf.rank(), calls)
        expected = near.self_weight * bf.rank()
        expected += sum(weight * peer for peer, weight in near.src_weights.items())
        verbs[name] = counted(lambda k: bf.neighbor_allreduce(own, round=k), expected)
    verbs[ALLREDUCE] = counted(lambda k: bf.allreduce(own), (bf.size() - 1) / 2)
    return verbs


def _settle() -> None:
    """No rank counts while another's earlier messages are under way."""
    bf.barrier()
    time.sleep(0.05)


def count_on_ranks(nbytes: int, calls: int) -> dict[str, Any]:
    """Count on the ranks of this run, which are processes."""
    from benchmarks.machine_info import facts_of_run

    bf.init(transport="mpi")  # as between machines, which share no memory
    inside, why = None, ""
    try:
        inside = OpenMpiCounter()
    except CounterUnavailableError as reason:
        why = str(reason)
    ranks = bf.allgather_object(count_verbs(nbytes, calls, inside))
    return {"ranks": ranks, "why": why, "header": facts_of_run()}
