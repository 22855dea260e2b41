"""Requests in progress on a GPU transport, advanced in the order in which they were posted."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class QueuedRequest(Protocol):
    """Interface of a queued request; those with the same order key advance in posting order."""

    order_key: Hashable
    """Requests with equal keys are transferred one after the other."""

    @property
    def next_may_start(self) -> bool:
        """True if the next request with the same key may be transferred."""
        ...

    @property
    def over(self) -> bool:
        """True if the request has ended: done, failed or abandoned."""
        ...

    def advance(self, *, first: bool) -> None:
        """Advance as far as possible; ``first`` of all with its key, or not."""
        ...


class RequestQueue(list[QueuedRequest]):
    """Requests in progress on one transport, in the order in which they were started."""

    def advance(self) -> None:
        """Advance all requests, and drop those that are over."""
        waiting: set[Hashable] = set()
        for request in self.copy():
            request.advance(first=request.order_key not in waiting)
            if not request.next_may_start:
                waiting.add(request.order_key)
        self[:] = [request for request in self if not request.over]
