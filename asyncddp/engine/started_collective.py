"""Collective of a transport, started after all ranks are known to have called the same one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncddp.engine.messages import ExchangeSignature
from asyncddp.engine.operation_exchanges import OperationExchanges
from asyncddp.errors import PeerError
from asyncddp.transport.base import Request

R = TypeVar("R")
S = TypeVar("S")
_POLL_SECONDS = 0.005


@dataclass
class StartedCollective(Generic[R]):
    """Collective of a transport in progress: its request, and the function that makes its result.

    Attributes:
        request: Request of the transport.
        finish: Returns the result once the request has completed.
        completed: True once :meth:`poll` has seen the request complete.
    """

    request: Request
    finish: Callable[[], R]
    completed: bool = False
    _error: PeerError | None = None

    def poll(self, pause: Callable[[], None] | None) -> None:
        """Poll the request in the calling thread, for some milliseconds at most."""
        done, limit = self.request.done, time.perf_counter() + _POLL_SECONDS
        try:
            while not done():
                if time.perf_counter() > limit:
                    return
                if pause is not None:
                    pause()
        except PeerError as error:
            self._error = error
        except BaseException:  # Ctrl-C, for example
            self.request.abandon()
            raise
        else:
            self.completed = True

    def resume(
        self, group: Sequence[int], signature: ExchangeSignature, op: OperationExchanges
    ) -> Generator[Any, None, R]:
        """Return steps that continue the collective in an operation, or raise its error."""

        def get() -> StartedCollective[R]:
            if self._error is not None:
                self.request.abandon()
                raise self._error
            return self

        op.agreed = True
        return run_collective(op, group, signature, get)

    def then(self, convert: Callable[[R], S]) -> StartedCollective[S]:
        """Return the same collective with a converted result."""
        finish = self.finish
        return StartedCollective(self.request, lambda: convert(finish()))


def run_collective(
    op: OperationExchanges,
    group: Sequence[int],
    signature: ExchangeSignature,
    start: Callable[[], StartedCollective[R]],
) -> Generator[Any, None, R]:
    """Start a collective as part of an operation, wait for it, and return its result.

    For the arguments see :meth:`OperationExchanges.collective`.
    """
    started: list[StartedCollective[R]] = []

    def begin() -> Request:
        started.append(start())
        return started[0].request

    yield from op.collective(group, signature, begin)
    return started[0].finish()
