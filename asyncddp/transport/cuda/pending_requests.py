"""Requests in progress on a GPU transport, advanced in posting order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable


class PendingRequest(ABC):
    """Base class of requests in progress; requests with equal order keys run one after another.

    Attributes:
        order_key: Requests with equal keys are transferred one after another.
        next_may_start: True if the next request with the same key may be transferred.
        over: True if the request has ended: done, failed or abandoned.
    """

    def __init__(self, order_key: Hashable, drive: Callable[[], None]) -> None:
        self.order_key, self._drive = order_key, drive  # which advances all of the transport
        self.next_may_start = self.over = False
        self._problem: Exception | None = None

    def done(self) -> bool:
        """Advance all requests of the transport; return whether this one has ended, or raise."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self.over

    @abstractmethod
    def advance(self, *, first: bool) -> None:
        """Advance as far as possible without waiting; ``first`` if first of its order key."""


class PendingRequests(list[PendingRequest]):
    """List of requests in progress on one transport, in posting order."""

    def advance(self) -> None:
        """Advance all requests, and remove ended ones."""
        waiting: set[Hashable] = set()
        for request in self.copy():
            request.advance(first=request.order_key not in waiting)
            if not request.next_may_start:
                waiting.add(request.order_key)
        self[:] = [request for request in self if not request.over]
