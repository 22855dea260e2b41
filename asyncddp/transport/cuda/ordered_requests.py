"""Drives a GPU transport's requests; those of one queue advance in the order of posting."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class OrderedRequest(Protocol):
    """Non-blocking request; those with equal order keys advance in the order of their start."""

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


class OrderedRequests(list[OrderedRequest]):
    """Requests of one transport that are not over, in the order in which they were started."""

    def advance(self) -> None:
        """Advance all requests, and drop those that are over."""
        waiting: set[Hashable] = set()
        for request in self.copy():
            request.advance(first=request.order_key not in waiting)
            if not request.next_may_start:
                waiting.add(request.order_key)
        self[:] = [request for request in self if not request.over]
