"""MPI's requests as transfers, and MPI's errors as ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from asyncddp.errors import PeerError, PeerLeftError
from asyncddp.transport.contract import Transfer
from asyncddp.transport.mpi_library import MPI

__all__ = ["Collective", "Divided", "Owner", "Receive", "Requests", "translated"]

P = ParamSpec("P")
R = TypeVar("R")


def translated(call: Callable[P, R]) -> Callable[P, R]:
    """Turn MPI's exceptions into ours."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call, with MPI's errors as ours."""
        try:
            return call(*args, **kwargs)
        except MPI.Exception as error:
            kind = error.Get_error_class()
            failed = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED")}
            if kind in failed:
                raise PeerLeftError(f"MPI reports that a process has failed: {error}") from error
            raise PeerError(f"MPI call {call.__name__} failed: {error}") from error

    return wrapper


class Owner(Protocol):
    """Whose requests they are."""

    broken: str | None
    """Why collectives cannot go on, if they cannot."""

    def leave_behind(self, requests: Requests) -> None:
        """Keep an unwanted transfer's buffers alive until MPI is through with them."""
        ...

    def ended(self) -> None:
        """A collective has ended."""
        ...


class Requests:
    """MPI requests of one transfer, with the buffers that must outlive them."""

    def __init__(self, owner: Owner, requests: list[MPI.Request], keep: Any) -> None:
        self._owner, self._requests, self._keep = owner, requests, keep
        self._ended = 0

    @translated
    def done(self) -> bool:
        """Test the requests, which end in their order, or nearly so."""
        while self._ended < len(self._requests):
            if not self._requests[self._ended].Test():
                return False
            self._ended += 1
        return True

    def over(self) -> bool:
        """Whether MPI has done with it, well or not."""
        try:
            return self.done()
        except PeerError:
            return True

    def abandon(self) -> None:
        """Keep the buffers until MPI is through with them."""
        self._owner.leave_behind(self)


class Receive(Requests):
    """A receive, which MPI can cancel."""

    @translated
    def abandon(self) -> None:
        """Keep the buffers until MPI is through with them."""
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
        super().abandon()


class Collective(Requests):
    """A collective, which MPI cannot cancel: the communicator is of no use afterwards."""

    _counted = False

    def done(self) -> bool:
        """Test the requests, and tell the owner once that all have ended."""
        over = super().done()
        if over and not self._counted:
            self._counted = True
            self._owner.ended()
        return over

    def abandon(self) -> None:
        """Keep the buffers until MPI is through with them."""
        self._owner.broken = "an earlier collective was given up while some ranks had not joined it"
        super().abandon()


class Divided:
    """A sum that is divided when it has come."""

    def __init__(self, total: Transfer, tensor: torch.Tensor, divisor: int) -> None:
        self._total, self._tensor, self._divisor = total, tensor, divisor
        self._done = False

    def done(self) -> bool:
        """Whether it has come; divided once."""
        if not self._done and self._total.done():
            self._tensor.div_(self._divisor)
            self._done = True
        return self._done

    def abandon(self) -> None:
        """Give the sum up."""
        self._total.abandon()
