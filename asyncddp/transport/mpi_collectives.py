"""Collectives over MPI, cut into pieces that C ints can count."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.errors import ArgumentError, PeerError
from asyncddp.memory.dtypes import DTYPES
from asyncddp.memory.packing import pack, unpack
from asyncddp.memory.views import as_bytes
from asyncddp.transport.contract import Transfer, Transport
from asyncddp.transport.mpi_communicators import CommunicatorPair
from asyncddp.transport.mpi_library import MPI
from asyncddp.transport.mpi_requests import Collective, Divided, Requests, translated

__all__ = ["MPICollectives", "gathered"]

T = TypeVar("T")

_PIECE = 1 << 30  # bytes in one MPI message: counts are C ints
_COUNTABLE = (1 << 31) - 1


class MPICollectives(Transport):
    """The part of :class:`~asyncddp.transport.mpi.MPITransport` that all ranks start together."""

    _comm: MPI.Intracomm
    _pair: CommunicatorPair
    broken: str | None = None

    @abstractmethod
    def leave_behind(self, requests: Requests) -> None:
        """Keep an unwanted transfer's buffers alive until MPI is through with them."""

    def _pieces(self, data: torch.Tensor, most: int | None = None) -> list[npt.NDArray[np.uint8]]:
        """The bytes of a tensor in pieces of whole elements that C ints can count."""
        flat = as_bytes(data).numpy()
        most = _PIECE if most is None else most
        step = max(data.element_size(), most - most % data.element_size())
        return [flat[start : start + step] for start in range(0, max(1, flat.size), step)]

    def _collective(self, start: Callable[[Any], MPI.Request], pieces: Sequence[Any]) -> Transfer:
        """Start a collective for each piece, the same number on all ranks."""
        if self.broken:
            raise PeerError(f"collectives cannot go on: {self.broken}. End and restart the run.")
        self._pair.collectives += 1
        self._pair.under_way += 1
        return Collective(self, [start(piece) for piece in pieces], pieces)

    def ended(self) -> None:
        """A collective has ended."""
        self._pair.under_way -= 1

    @translated
    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Transfer:
        """Iallreduce, piece by piece."""
        datatype, operation = _summed(tensor.dtype)
        into = tensor if out is None else out
        same = into.data_ptr() == tensor.data_ptr()

        def start(pair: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]) -> MPI.Request:
            """Start the reduction of one piece."""
            count = pair[0].size // tensor.element_size()
            given: Any = MPI.IN_PLACE if same else [pair[0], count, datatype]
            return self._comm.Iallreduce(given, [pair[1], count, datatype], operation)

        pieces = list(zip(self._pieces(tensor), self._pieces(into), strict=True))
        under_way = self._collective(start, pieces)
        return under_way if divisor is None else Divided(under_way, into, divisor)

    @translated
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Transfer:
        """Ireduce_scatter_block; what C ints cannot count is copied, column by column."""
        datatype, operation = _summed(tensor.dtype)
        step = max(1, _PIECE // (self.size * tensor.element_size()))

        def start(pair: tuple[torch.Tensor, torch.Tensor]) -> MPI.Request:
            """Start the reduction of some columns."""
            count = pair[1].numel()  # of a part: so mpi4py counts what is sent, too
            given, taken = ([as_bytes(side).numpy(), count, datatype] for side in pair)
            return self._comm.Ireduce_scatter_block(given, taken, operation)

        parts = torch.split(tensor.view(self.size, out.numel()), step, dim=1)
        columns = [part.contiguous() for part in parts]
        pairs = list(zip(columns, torch.split(out, step), strict=True))
        under_way = self._collective(start, pairs)
        return under_way if divisor is None else Divided(under_way, out, divisor)

    @translated
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Transfer:
        """Ibcast of the bytes, piece by piece."""
        return self._collective(
            lambda piece: self._comm.Ibcast([piece, MPI.BYTE], root), self._pieces(tensor)
        )

    @translated
    def iallgather(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]
    ) -> Transfer:
        """Iallgatherv of the bytes.

        Raises:
            ArgumentError: There are more bytes than the C ints of MPI 3 can count.
        """
        if out.nbytes > _COUNTABLE:
            raise ArgumentError(
                f"allgather of {out.nbytes} bytes in all: expected at most {_COUNTABLE}, which MPI "
                "can count; gather the tensor in parts"
            )
        size = tensor.element_size()
        given = [as_bytes(tensor).numpy(), MPI.BYTE]
        taken = [as_bytes(out).numpy(), [count * size for count in counts], MPI.BYTE]
        return self._collective(lambda both: self._comm.Iallgatherv(*both), [(given, taken)])

    @translated
    def ibarrier(self) -> Transfer:
        """Ibarrier."""
        return self._collective(lambda _: self._comm.Ibarrier(), [None])


def _summed(dtype: torch.dtype) -> tuple[MPI.Datatype, MPI.Op]:
    """What MPI calls a dtype, and how it forms sums of it."""
    return getattr(MPI, DTYPES[dtype].mpi), MPI.LOR if dtype == torch.bool else MPI.SUM


def gathered(comm: MPI.Comm, mine: T, kind: type[T]) -> list[T]:
    """What every rank of a communicator puts in, in their order; collective.

    Args:
        comm: The communicator.
        mine: Numbers, strings, None, or records of them.
        kind: The type to which all of it must belong.

    Raises:
        PeerError: A rank has put in something else.
    """
    data = np.frombuffer(pack(mine), dtype=np.uint8)
    sizes = np.zeros(comm.size, dtype=np.int32)
    comm.Allgather(np.array([data.size], dtype=np.int32), sizes)
    whole = np.empty(int(sizes.sum()), dtype=np.uint8)
    comm.Allgatherv(data, [whole, sizes, MPI.BYTE])
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    return [
        unpack(part.tobytes(), kind, f"what rank {peer} says of its machine")
        for peer, part in enumerate(parts)
    ]
