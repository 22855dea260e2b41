"""What lies in a rank's buffers: what neighbours have put there, and what this rank got of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from asyncddp.memory.allocate import empty
from asyncddp.windows.contract import Incoming, Shown
from asyncddp.windows.sums import Term, weighted

__all__ = ["Buffers", "Content", "Staleness"]


class Staleness(NamedTuple):
    """How old what was last read of a neighbour is.

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


class Content(NamedTuple):
    """The value of a buffer, as terms of a sum, and its p."""

    terms: list[Term]
    p: float


class _Ground(NamedTuple):
    """What lies under all that a neighbour adds: the first value, or what this rank got itself."""

    tensor: torch.Tensor | None
    p: float
    since: int


class Buffers:
    """The buffers of one window on one rank. The window's lock guards them.

    A buffer is a value in thought: the newest version that the neighbour has published, on top of a
    ground while nothing was put over that or taken.

    Args:
        edges: The edges that end here, by the neighbour at the other end.
        first: What lies in them at first; None for zero.
        shape: Of the tensors.
        dtype: Of the tensors.
    """

    def __init__(
        self,
        edges: Mapping[int, Incoming],
        first: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._edges, self._shape, self._dtype = edges, shape, dtype
        self._grounds = {source: _Ground(first, 0.0, 0) for source in edges}
        self._updated = dict.fromkeys(edges, 0)
        self._gets_made = dict.fromkeys(edges, 0)
        self._read: dict[int, Shown] = {}
        self._made = time.monotonic()

    def content(self, source: int, *, take: bool) -> Content:
        """What lies in a neighbour's buffer; it stays as it is until :meth:`release`.

        Args:
            source: The neighbour.
            take: Whether the buffer is zero afterwards.

        Raises:
            PeerLeftError: It cannot be read any more.
        """
        edge = self._edges[source]
        shown = edge.take() if take else edge.look()
        ground = self._grounds.get(source)
        if ground is not None:
            over = shown is not None and shown.floor > ground.since
            if take or over:
                del self._grounds[source]
            if over:
                ground = None
        terms: list[Term] = []
        p = 0.0
        if ground is not None:
            p += ground.p
            if ground.tensor is not None:
                terms.append((ground.tensor, 1.0))
        if shown is not None:
            self._read[source] = shown
            terms.append((shown.tensor, shown.weight))
            p += shown.p
        return Content(terms, p)

    def contents(self, sources: Iterable[int], *, take: bool) -> dict[int, Content]:
        """What lies in some buffers; where one of them cannot be read, none is taken.

        Raises:
            PeerLeftError: One of them cannot be read any more.
        """
        found: dict[int, Content] = {}
        try:
            for source in sorted(sources):
                found[source] = self.content(source, take=take)
        except BaseException:
            for source, content in found.items() if take else ():
                self._grounds[source] = self._ground(source, content.terms, content.p)
            raise
        return found

    def lay_down(self, source: int, shown: Shown, weight: float) -> None:
        """Put what was got of a neighbour in place of what lies in its buffer; p stays."""
        try:
            _, p = self.content(source, take=True)
        finally:
            self.release([source])
        self._grounds[source] = self._ground(source, [(shown.tensor, weight * shown.weight)], p)
        self._gets_made[source] += 1
        self._read[source] = shown._replace(version=self._edges[source].taken)

    def _ground(self, source: int, terms: list[Term], p: float) -> _Ground:
        total = empty(self._shape, self._dtype)
        weighted(total, terms)
        return _Ground(total, p, self._edges[source].taken)

    def last_read(self, source: int) -> int:
        """The version of a neighbour's that was read last; 0 before the first."""
        shown = self._read.get(source)
        return 0 if shown is None else shown.version

    def release(self, sources: Iterable[int]) -> None:
        """Let go of what was seen."""
        for source in sources:
            self._edges[source].release()

    # how old it is

    def updated(self, sources: Iterable[int]) -> None:
        """An update was made of what was read of some neighbours."""
        chosen = set(sources)
        for source, edge in self._edges.items():
            seen = self._read.get(source) if source in chosen else None
            self._updated[source] = edge.version() if seen is None else seen.version
            self._gets_made[source] = 0

    def versions(self) -> dict[int, int]:
        """How many times each was written since the last update."""
        return {
            source: edge.version() - self._updated[source] + self._gets_made[source]
            for source, edge in self._edges.items()
        }

    def staleness(self, clock: int) -> dict[int, Staleness]:
        """How old what was last read of each neighbour is, for a rank that has made some steps."""
        now, found = time.monotonic(), {}
        for source, edge in self._edges.items():
            shown = self._read.get(source)
            version, step, when = 0, 0, self._made
            if shown is not None:
                version, step, when = shown.version, shown.clock, shown.time
            steps = max(0, edge.clock() - step)
            found[source] = Staleness(version, steps, max(0.0, now - when), clock - step)
        return found
