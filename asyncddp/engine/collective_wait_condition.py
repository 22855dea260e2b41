"""Wait condition of a transport's collective, which finds the cause if the collective fails."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.engine.messages import MatchKey
from asyncddp.errors import PeerError
from asyncddp.transport.base import Request

_GRACE = 0.3  # seconds for a signature that explains an error of the transport


class CollectiveWaitCondition:
    """Wait condition: a collective of the transport, such as MPI's allreduce, has completed.

    If ranks have called different collectives, the transport fails without naming them. The
    signatures that ranks exchange name them, and get a moment to arrive.
    """

    def __init__(
        self, request: Request, exchange: ExchangeRequest, group: Sequence[int], rank: int
    ) -> None:
        self._request, self._exchange, self._group, self._rank = request, exchange, group, rank
        self._problem: PeerError | None = None
        self._deadline = 0.0

    def done(self) -> bool:
        """Return whether the collective has ended; raise the error if it has failed."""
        self._exchange.raise_if_failed()
        if self._problem is None:
            try:
                return self._request.done()
            except PeerError as problem:
                self._problem, self._deadline = problem, time.monotonic() + _GRACE
        if time.monotonic() > self._deadline:
            raise self._problem
        return False

    def missing(self) -> list[tuple[int, MatchKey]]:
        """Return the late ranks if the transport knows them, else all other ranks."""
        late = self._late()
        late = self._group if late is None else late
        return [(peer, self._exchange.key) for peer in late if peer != self._rank]

    def joined(self) -> list[int]:
        """Return the other ranks that are known to have called the collective."""
        late = self._late()
        here = () if late is None else set(self._group).difference(late)
        return sorted(peer for peer in here if peer != self._rank)

    def _late(self) -> Sequence[int] | None:
        late_places = getattr(self._request, "late_ranks", None)  # in the group
        return None if late_places is None else [self._group[at] for at in late_places()]
