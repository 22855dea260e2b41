"""Receive buffers of a window: one per in-neighbour, for values that it put or this rank got."""

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
    """Staleness of the value last read from a neighbour: its version, and age in steps and seconds.

    Attributes:
        version: Number of times the neighbour had published to this rank; 0 before the first read.
        steps: Known steps of the neighbour since then.
        seconds: Time since publication, or since arrival if it came from another machine.
        lag: Steps by which the neighbour was behind this rank's own count; negative if ahead.
    """

    version: int
    steps: int
    seconds: float
    lag: int


class WeightedTerms(NamedTuple):
    """Value of a receive buffer: a weighted sum as terms to be added, and its push-sum weight."""

    terms: list[WeightedTensor]
    p: float


class _AccumulateBase(NamedTuple):
    """Base value that a neighbour's later ``win_accumulate`` adds to: initial, or last got."""

    tensor: torch.Tensor | None
    p: float
    since: int


class ReceiveBuffers:
    """Receive buffers of one window on one rank, one per in-neighbour.

    A buffer has no memory of its own: its value is the newest version that the neighbour has
    published, plus a base value until that is overwritten or taken. ``first`` is the initial base
    value, None for zero. ``read`` decodes a published tensor. Reading raises a PeerLeftError if the
    neighbour has exited and its tensor is lost. The window's lock guards the buffers.
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
        """Return a buffer's value, valid until :meth:`release`; ``take`` zeroes the buffer."""
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
        """Return the values of several buffers; if one cannot be read, none is taken."""
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
        """Replace the value of a neighbour's buffer by a tensor that was got; p is kept."""
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
        """Return version and step of the value last read from a neighbour; 0, 0 before."""
        snapshot = self._read.get(source)
        return (0, 0) if snapshot is None else (snapshot.version, snapshot.clock)

    def release(self, sources: Iterable[int]) -> None:
        """Release the snapshots of some neighbours."""
        for source in sources:
            self._edges[source].release()

    # versions and staleness

    def updated(self, sources: Iterable[int]) -> None:
        """Record that an update has read the buffers of some neighbours."""
        chosen = set(sources)
        for source, edge in self._edges.items():
            seen = self._read.get(source) if source in chosen else None
            self._updated[source] = edge.version() if seen is None else seen.version
            self._gets_made[source] = 0

    def versions(self) -> dict[int, int]:
        """Return the number of writes to each buffer since the last update."""
        return {
            source: edge.version() - self._updated[source] + self._gets_made[source]
            for source, edge in self._edges.items()
        }

    def staleness(self, clock: int) -> dict[int, Staleness]:
        """Return the staleness of each neighbour's last read value; ``clock``: own step count."""
        now, found = time.monotonic(), {}
        for source, edge in self._edges.items():
            snapshot, (version, step) = self._read.get(source), self.last_read(source)
            when = self._made if snapshot is None else snapshot.time
            steps, lag = max(0, edge.clock() - step) % CONCLUDED, clock - step
            if lag <= -(CONCLUDED // 2):  # neighbours that have concluded have no more steps
                lag += CONCLUDED
            found[source] = Staleness(version, steps, max(0.0, now - when), lag)
        return found
