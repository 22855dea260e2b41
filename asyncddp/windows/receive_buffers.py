"""Receive buffers of a window: per in-neighbour, the value that it put or that this rank got."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from asyncddp.kernels.cpu_weighted_sum import WeightedTensor, weighted_sum
from asyncddp.tensors.allocation import empty
from asyncddp.windows.departure_detector import CONCLUDED
from asyncddp.windows.edge import EdgeReader, PublishedSnapshot


class Staleness(NamedTuple):
    """Age of the value that was last read from a neighbour's window, in versions and in seconds.

    Attributes:
        version: How many times the neighbour had published to this rank; 0: nothing was read yet.
        steps: Steps that the neighbour is known to have made since.
        seconds: Time since it was published, or has come where it came from another machine.
        lag: Steps by which the neighbour was behind this rank's own count; negative if ahead.
    """

    version: int
    steps: int
    seconds: float
    lag: int


class WeightedTerms(NamedTuple):
    """Content of a receive buffer as weights and tensors to be summed, with its push-sum weight."""

    terms: list[WeightedTensor]
    p: float


class _AccumulateBase(NamedTuple):
    """Value that a neighbour's later ``win_accumulate`` adds to: the first, or the last read."""

    tensor: torch.Tensor | None
    p: float
    since: int


class ReceiveBuffers:
    """Receive buffers of one window on one rank; guarded by the window's lock.

    A buffer has no memory of its own: its value is the newest version that the neighbour has
    published, plus a base value, until that is overwritten or taken; ``first`` is the initial one,
    None for zero. ``read`` gives the values of a published tensor. A value that cannot be read any
    more raises a PeerLeftError.
    """

    def __init__(
        self,
        edges: Mapping[int, EdgeReader],
        first: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._edges, self._shape, self._dtype = edges, shape, dtype
        self._values_of = read
        self._base_values = {source: _AccumulateBase(first, 0.0, 0) for source in edges}
        self._updated = dict.fromkeys(edges, 0)
        self._gets_made = dict.fromkeys(edges, 0)
        self._read: dict[int, PublishedSnapshot] = {}
        self._made = time.monotonic()

    def content(self, source: int, *, take: bool) -> WeightedTerms:
        """Return a buffer's value, valid until :meth:`release`; zero the buffer if it is taken."""
        edge = self._edges[source]
        snapshot = edge.take() if take else edge.look()
        base = self._base_values.get(source)
        if base is not None:
            over = snapshot is not None and snapshot.floor > base.since
            if take or over:
                del self._base_values[source]
            base = None if over else base
        terms: list[WeightedTensor] = []
        p = 0.0 if base is None else base.p
        if base is not None and base.tensor is not None:
            terms.append((base.tensor, 1.0))
        if snapshot is not None:
            self._read[source] = snapshot
            terms.append((self._values_of(snapshot.tensor), snapshot.weight))
            p += snapshot.p
        return WeightedTerms(terms, p)

    def contents(self, sources: Iterable[int], *, take: bool) -> dict[int, WeightedTerms]:
        """Return the values of some buffers; if one cannot be read, none is taken."""
        found: dict[int, WeightedTerms] = {}
        try:
            for source in sorted(sources):
                found[source] = self.content(source, take=take)
        except BaseException:
            for source, content in found.items() if take else ():
                self._base_values[source] = self._base_value(source, content.terms, content.p)
            raise
        return found

    def store_get_result(self, source: int, snapshot: PublishedSnapshot, weight: float) -> None:
        """Replace the value of a neighbour's buffer by a tensor that was got; p stays."""
        try:
            _, p = self.content(source, take=True)
        finally:
            self.release([source])
        term = self._values_of(snapshot.tensor), weight * snapshot.weight
        self._base_values[source] = self._base_value(source, [term], p)
        self._gets_made[source] += 1
        self._read[source] = snapshot._replace(version=self._edges[source].taken)

    def _base_value(self, source: int, terms: list[WeightedTensor], p: float) -> _AccumulateBase:
        total = empty(self._shape, self._dtype)
        weighted_sum(total, terms)
        return _AccumulateBase(total, p, self._edges[source].taken)

    def last_read(self, source: int) -> tuple[int, int]:
        """Return the version that was last read from a neighbour, and its step; 0 before that."""
        snapshot = self._read.get(source)
        return (0, 0) if snapshot is None else (snapshot.version, snapshot.clock)

    def release(self, sources: Iterable[int]) -> None:
        """Release the snapshots of some neighbours."""
        for source in sources:
            self._edges[source].release()

    # versions and staleness

    def updated(self, sources: Iterable[int]) -> None:
        """Record that an update has used the buffers of some neighbours."""
        chosen = set(sources)
        for source, edge in self._edges.items():
            seen = self._read.get(source) if source in chosen else None
            self._updated[source] = edge.version() if seen is None else seen.version
            self._gets_made[source] = 0

    def versions(self) -> dict[int, int]:
        """Return how many times each buffer was written since the last update."""
        return {
            source: edge.version() - self._updated[source] + self._gets_made[source]
            for source, edge in self._edges.items()
        }

    def staleness(self, clock: int) -> dict[int, Staleness]:
        """Return the age of what was last read from each neighbour, by this rank's step count."""
        now, found = time.monotonic(), {}
        for source, edge in self._edges.items():
            snapshot, (version, step) = self._read.get(source), self.last_read(source)
            when = self._made if snapshot is None else snapshot.time
            steps, lag = max(0, edge.clock() - step) % CONCLUDED, clock - step
            if lag <= -(CONCLUDED // 2):  # neighbours that have concluded have no more steps
                lag += CONCLUDED
            found[source] = Staleness(version, steps, max(0.0, now - when), lag)
        return found
