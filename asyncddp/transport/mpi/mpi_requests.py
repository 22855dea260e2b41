"""Requests of the MPI transport: wrap mpi4py's requests, and translate MPI's errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from asyncddp.errors import PeerError, PeerLeftError
from asyncddp.transport.base import COLLECTIVE_GIVEN_UP, Request
from asyncddp.transport.mpi.runtime import MPI

P = ParamSpec("P")
R = TypeVar("R")


def translate_mpi_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise this library's exceptions in place of mpi4py's."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except MPI.Exception as error:
            kind = error.Get_error_class()
            failed = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED")}
            if kind in failed:
                raise PeerLeftError(f"MPI reports that a process has failed: {error}") from error
            raise PeerError(f"MPI call {call.__name__} failed: {error}") from error

    return wrapper


class MPIRequestCallbacks(Protocol):
    """Interface by which an MPI request reports completion or abandonment to its transport."""

    broken: str | None
    """Reason why no further collective can run; None if they can."""

    def keep_until_complete(self, requests: MPIRequest) -> None:
        """Keep an abandoned request's buffers alive until MPI has completed it."""
        ...

    def collective_completed(self) -> None:
        """Count a collective as completed."""
        ...


class MPIRequest:
    """Request of the MPI transport: one mpi4py request per piece of a tensor, and their buffers."""

    def __init__(self, owner: MPIRequestCallbacks, requests: list[MPI.Request], keep: Any) -> None:
        self._owner, self._requests, self._keep = owner, requests, keep
        self._ended = 0

    @translate_mpi_errors
    def done(self) -> bool:
        """Test the MPI requests in the order in which they were started."""
        while self._ended < len(self._requests):
            if not self._requests[self._ended].Test():
                return False
            self._ended += 1
        return True

    def abandon(self) -> None:
        """Hand the buffers to the owner until MPI has completed the request."""
        self._owner.keep_until_complete(self)


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
    """Request of an MPI collective; MPI cannot cancel it: abandoning breaks the communicator."""

    _counted = False

    def done(self) -> bool:
        """Test the MPI requests, and tell the owner once when all have completed."""
        completed = super().done()
        if completed and not self._counted:
            self._counted = True
            self._owner.collective_completed()
        return completed

    def abandon(self) -> None:
        """Mark the owner's collectives as broken and keep the buffers."""
        self._owner.broken = COLLECTIVE_GIVEN_UP
        super().abandon()


class ScaledReductionRequest:
    """Request of a reduction whose sum is divided by a number on completion, as for an average."""

    def __init__(self, total: Request, tensor: torch.Tensor, divisor: int) -> None:
        self._total, self._tensor, self._divisor = total, tensor, divisor
        self._done = False

    def done(self) -> bool:
        """Test the reduction; divide its sum when it has completed."""
        if not self._done and self._total.done():
            self._tensor.div_(self._divisor)
            self._done = True
        return self._done

    def abandon(self) -> None:
        """Abandon the reduction."""
        self._total.abandon()
