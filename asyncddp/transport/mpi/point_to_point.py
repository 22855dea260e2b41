"""Sends and receives of tensors over one communicator, in pieces that suit the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncddp.transport.mpi.communicator_pair import CommunicatorPair
from asyncddp.transport.mpi.runtime import MPI, translate_mpi_errors

LARGEST_PIECE = 1 << 30  # bytes in one MPI message: counts are C ints
_EAGER_BYTES = 60 << 10  # bytes that MPI libraries send over TCP by the eager protocol


class MPIPointToPoint:
    """Point-to-point sends and receives by MPI, over the communicator for control or for tensors.

    Attributes:
        same_host: Ranks that are not reached over TCP; None where none is.
    """

    def __init__(self, pair: CommunicatorPair, *, bulk: bool) -> None:
        self._pair, self._which = pair, int(bulk)
        self._comm = pair.bulk if bulk else pair.comm
        self.same_host: frozenset[int] | None = None

    def _piece_limit(self, peer: int) -> int:
        """Return the largest piece in bytes for a peer, equal on both ends.

        Over TCP both directions of a link would take turns for pieces of the rendezvous protocol:
        the peer's reply waits in its socket behind what it is sending itself.
        """
        near = self.same_host is None or peer in self.same_host
        return LARGEST_PIECE if near else _EAGER_BYTES

    @translate_mpi_errors
    def isend(self, data: torch.Tensor, peer: int, tag: int) -> MPIRequest:
        """Send by Isend, in pieces small enough for eager sends or for C ints."""
        pieces = cut(data, self._piece_limit(peer))
        started = [self._comm.Isend([piece, MPI.BYTE], peer, tag) for piece in pieces]
        self._pair.sent[self._which][peer] += len(pieces)
        return MPIRequest(self._pair, started, data)

    @translate_mpi_errors
    def irecv(self, out: torch.Tensor, peer: int, tag: int) -> MPIReceiveRequest:
        """Receive a tensor of this size sent by :meth:`isend`."""
        pieces = cut(out, self._piece_limit(peer))
        started = [self._comm.Irecv([piece, MPI.BYTE], peer, tag) for piece in pieces]
        self._pair.received[self._which][peer] += len(pieces)
        return MPIReceiveRequest(self._pair, started, out)


def cut(data: torch.Tensor, most: int = LARGEST_PIECE) -> list[MPI.buffer]:
    """Cut a tensor's memory into pieces of whole elements, of at most ``most`` bytes.

    They do not keep the tensor, which must be contiguous and on the host.
    """
    size, address, element = data.nbytes, data.data_ptr(), data.element_size()
    step = max(element, most - most % element)
    return [
        MPI.buffer.fromaddress(address + start, min(step, size - start))
        for start in range(0, max(1, size), step)
    ]


class MPIRequest:
    """Request of the MPI transport: one mpi4py request per piece of a tensor, and their buffers."""

    def __init__(self, pair: CommunicatorPair, requests: list[MPI.Request], keep: Any) -> None:
        self._pair, self._requests, self._keep = pair, requests, keep
        self.moves = 0  # requests that have ended

    @translate_mpi_errors
    def done(self) -> bool:
        """Test the MPI requests in the order of their start."""
        while self.moves < len(self._requests):
            if not self._requests[self.moves].Test():
                return False
            self.moves += 1
        return True

    def test(self) -> bool:
        """Do the same as :meth:`done`."""
        return self.done()

    def abandon(self) -> None:
        """Keep the buffers until MPI has completed the request."""
        self._pair.counts_invalid = True
        self._pair.abandoned.append(self)


class MPIReceiveRequest(MPIRequest):
    """Request of an MPI receive, which can be cancelled."""

    @translate_mpi_errors
    def abandon(self) -> None:
        """Cancel the MPI requests and keep the buffers until they have completed."""
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
        super().abandon()


class MPICollectiveRequest(MPIRequest):
    """Request of an MPI collective; MPI cannot cancel it: abandoning breaks the communicator.

    ``finish`` is called once all pieces are complete, such as to divide the sum for an average.
    """

    def __init__(
        self,
        pair: CommunicatorPair,
        requests: list[MPI.Request],
        keep: Any,
        finish: Callable[[], object] | None,
        on_abandon: Callable[[], None],
    ) -> None:
        super().__init__(pair, requests, keep)
        self._finish, self._on_abandon = finish, on_abandon
        self._completed = False

    def done(self) -> bool:
        """Test the MPI requests; count the collective as completed when all of them are."""
        if not self._completed and super().done():
            self._completed = True
            self._pair.pending_collectives -= 1
            if self._finish is not None:
                self._finish()
        return self._completed

    def abandon(self) -> None:
        """Refuse later collectives and keep the buffers."""
        self._on_abandon()
        super().abandon()
