"""Tracing of transfers: records the duration of messages and collectives in the timeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.timeline.chrome_trace import Span
from asyncddp.timeline.tracer import Tracer
from asyncddp.timeline.tracks import TRANSFER_TRACK
from asyncddp.transport.base import Request


class TracedRequest:
    """Transport request that records its transfer in the timeline when it completes.

    Args:
        request: The request.
        record: Called once, when the request has completed well.
    """

    def __init__(self, request: Request, record: Callable[[], None]) -> None:
        self._request = request
        self._record: Callable[[], None] | None = record

    def done(self) -> bool:
        """Tell whether it has completed."""
        completed = self._request.done()
        if completed and self._record is not None:
            record, self._record = self._record, None
            record()
        return completed

    def abandon(self) -> None:
        """Give up waiting for it."""
        self._record = None
        self._request.abandon()


def trace_transfer(
    tracer: Tracer,
    kind: str,
    exchange: ExchangeRequest,
    peer: int,
    nbytes: int,
    begun: int,
    request: Request | None,
) -> Request | None:
    """Record one message of an exchange in the timeline: now, or once its transfer has ended."""
    (name, step), verb = exchange.key, exchange.signature.verb

    def record() -> None:
        """Record the transfer, which has ended."""
        tracer.record_transfer(kind, verb, name, peer, nbytes, begun, time.monotonic_ns(), step)

    if request is not None:
        return TracedRequest(request, record)
    record()
    return None


def trace_collective(tracer: Tracer, exchange: ExchangeRequest, ranks: int, begun: int) -> None:
    """Record a collective that has just ended in the timeline."""
    signature = exchange.signature
    sizes = [size for size in signature.shape if size is not None]
    nbytes = math.prod(sizes) * getattr(torch, signature.dtype).itemsize
    verb = signature.verb.partition("(")[0].partition(" ")[0]
    args = {"verb": verb, "name": exchange.key.name, "bytes": nbytes, "ranks": ranks}
    tracer.record(
        Span("collective", "collective", TRANSFER_TRACK, begun, time.monotonic_ns(), args)
    )
