"""Requests in progress on a GPU transport, advanced in the order in which they were posted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable


class PendingRequest(ABC):
    """Base class of requests in progress; those of one order key are transferred one by one.

    Attributes:
        order_key: Requests with equal keys are transferred one after the other.
        next_may_start: True if the next request with the same key may be transferred.
        over: True if the request has ended: done, failed or abandoned.
    """

    def __init__(self, order_key: Hashable, drive: Callable[[], None]) -> None:
        self.order_key, self._drive = order_key, drive  # which advances all of the transport
        self.next_may_start = self.over = False
        self._problem: Exception | None = None

    def done(self) -> bool:
        """Advance all requests of the transport; return whether this one is over, or raise."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self.over

    @abstractmethod
    def advance(self, *, first: bool) -> None:
        """Advance as far as possible without waiting; ``first`` of all with its key, or not."""


class PendingRequests(list[PendingRequest]):
    """Requests in progress on one transport, in the order in which they were started."""

    def advance(self) -> None:
        """Advance all requests, and drop those that are over."""
        waiting: set[Hashable] = set()
        for request in self.copy():
            request.advance(first=request.order_key not in waiting)
            if not request.next_may_start:
                waiting.add(request.order_key)
        self[:] = [request for request in self if not request.over]
