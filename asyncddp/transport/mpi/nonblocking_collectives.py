"""Nonblocking MPI collectives, split into pieces whose size fits into C ints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from asyncddp.errors import ArgumentError, PeerError
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.mpi.communicator_pair import CommunicatorPair
from asyncddp.transport.mpi.mpi_requests import (
    MPICollectiveRequest,
    MPIRequest,
    ScaledReductionRequest,
    translate_mpi_errors,
)
from asyncddp.transport.mpi.runtime import MPI

T = TypeVar("T")

_PIECE_BYTES = 1 << 30  # bytes in one MPI message: counts are C ints
_MAX_COUNT = (1 << 31) - 1


class MPICollectives(Transport):
    """Base class of the MPI transport that implements its nonblocking collectives."""

    _comm: MPI.Intracomm
    _pair: CommunicatorPair
    broken: str | None = None

    @abstractmethod
    def keep_until_complete(self, requests: MPIRequest) -> None:
        """Keep an abandoned request's buffers alive until MPI has completed it."""

    def _pieces(self, data: torch.Tensor, most: int | None = None) -> list[npt.NDArray[np.uint8]]:
        """Split a tensor's bytes into pieces of whole elements that C ints can count."""
        flat = as_bytes(data).numpy()
        most = _PIECE_BYTES if most is None else most
        step = max(data.element_size(), most - most % data.element_size())
        return [flat[start : start + step] for start in range(0, max(1, flat.size), step)]

    def _collective(self, start: Callable[[Any], MPI.Request], pieces: Sequence[Any]) -> Request:
        """Start a collective for each piece, the same number on all ranks."""
        if self.broken:
            raise PeerError(f"collectives cannot go on: {self.broken}. End and restart the run.")
        self._pair.collectives += 1
        self._pair.pending_collectives += 1
        return MPICollectiveRequest(self, [start(piece) for piece in pieces], pieces)

    def collective_completed(self) -> None:
        """Count a collective as completed."""
        self._pair.pending_collectives -= 1

    @translate_mpi_errors
    def iallreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None = None,
        divisor: int | None = None,
    ) -> Request:
        """Start an MPI_Iallreduce for each piece."""
        datatype, operation = _mpi_reduction(tensor.dtype)
        into = tensor if out is None else out
        same = into.data_ptr() == tensor.data_ptr()

        def start(pair: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]) -> MPI.Request:
            """Start the reduction of one piece."""
            count = pair[0].size // tensor.element_size()
            given: Any = MPI.IN_PLACE if same else [pair[0], count, datatype]
            return self._comm.Iallreduce(given, [pair[1], count, datatype], operation)

        pieces = list(zip(self._pieces(tensor), self._pieces(into), strict=True))
        request = self._collective(start, pieces)
        return request if divisor is None else ScaledReductionRequest(request, into, divisor)

    @translate_mpi_errors
    def ireduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, divisor: int | None = None
    ) -> Request:
        """Start MPI_Ireduce_scatter_block; larger tensors are copied in blocks of columns."""
        datatype, operation = _mpi_reduction(tensor.dtype)
        step = max(1, _PIECE_BYTES // (self.size * tensor.element_size()))

        def start(pair: tuple[torch.Tensor, torch.Tensor]) -> MPI.Request:
            """Start the reduction of some columns."""
            count = pair[1].numel()  # per part: mpi4py counts what is sent in the same way
            given, taken = ([as_bytes(side).numpy(), count, datatype] for side in pair)
            return self._comm.Ireduce_scatter_block(given, taken, operation)

        parts = torch.split(tensor.view(self.size, out.numel()), step, dim=1)
        columns = [part.contiguous() for part in parts]
        pairs = list(zip(columns, torch.split(out, step), strict=True))
        request = self._collective(start, pairs)
        return request if divisor is None else ScaledReductionRequest(request, out, divisor)

    @translate_mpi_errors
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start an MPI_Ibcast of the bytes for each piece."""
        return self._collective(
            lambda piece: self._comm.Ibcast([piece, MPI.BYTE], root), self._pieces(tensor)
        )

    @translate_mpi_errors
    def iallgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: Sequence[int]) -> Request:
        """Start an MPI_Iallgatherv of the bytes.

        Raises:
            ArgumentError: There are more bytes than the C ints of MPI 3 can count.
        """
        if out.nbytes > _MAX_COUNT:
            raise ArgumentError(
                f"allgather of {out.nbytes} bytes in all: expected at most {_MAX_COUNT}, which MPI "
                "can count; gather the tensor in parts"
            )
        size = tensor.element_size()
        given = [as_bytes(tensor).numpy(), MPI.BYTE]
        taken = [as_bytes(out).numpy(), [count * size for count in counts], MPI.BYTE]
        return self._collective(lambda both: self._comm.Iallgatherv(*both), [(given, taken)])

    @translate_mpi_errors
    def ibarrier(self) -> Request:
        """Start an MPI_Ibarrier."""
        return self._collective(lambda _: self._comm.Ibarrier(), [None])


def _mpi_reduction(dtype: torch.dtype) -> tuple[MPI.Datatype, MPI.Op]:
    """Return MPI's datatype and reduction operation for a dtype."""
    return getattr(MPI, DTYPES[dtype].mpi), MPI.LOR if dtype == torch.bool else MPI.SUM


def allgather_records(comm: MPI.Comm, mine: T, kind: type[T]) -> list[T]:
    """Gather one record from every rank of a communicator, in rank order; collective.

    Args:
        comm: The communicator.
        mine: This rank's record: numbers, strings, None, or named tuples of them.
        kind: Type that every record must have.

    Raises:
        PeerError: A rank has given something else.
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
