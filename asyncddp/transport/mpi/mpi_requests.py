"""Requests of the MPI transport: mpi4py's requests, with the buffers that MPI still uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncddp.transport.mpi.communicator_pair import CommunicatorPair
from asyncddp.transport.mpi.runtime import MPI, translate_mpi_errors


class MPIRequest:
    """Request of the MPI transport: one mpi4py request per piece of a tensor, and their buffers."""

    def __init__(self, pair: CommunicatorPair, requests: list[MPI.Request], keep: Any) -> None:
        self._pair, self._requests, self._keep = pair, requests, keep
        self.moves = 0  # requests that have ended

    @translate_mpi_errors
    def done(self) -> bool:
        """Test the MPI requests in the order in which they were started."""
        while self.moves < len(self._requests):
            if not self._requests[self.moves].Test():
                return False
            self.moves += 1
        return True

    def test(self) -> bool:
        """Do what :meth:`done` does."""
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
        """Test the MPI requests; count the collective as completed once all of them are."""
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
