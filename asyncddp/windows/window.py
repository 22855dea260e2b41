"""One window on one rank: what it publishes, what its neighbours have, and how old that is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from asyncddp.context import Context
from asyncddp.windows.contract import Buffer, Incoming, Outgoing, Shown
from asyncddp.windows.handle import WindowHandle
from asyncddp.windows.pool import Pool
from asyncddp.windows.sums import Term, weighted

__all__ = ["Edges", "Staleness", "Window"]


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


class Edges(NamedTuple):
    """The ends of a window's edges on one rank, by the neighbour at the other end.

    Attributes:
        outgoing: What this rank puts to others.
        incoming: What others put to this one.
        shows: What this rank lets others get.
        gets: What others let this one get.
    """

    outgoing: dict[int, Outgoing]
    incoming: dict[int, Incoming]
    shows: dict[int, Outgoing]
    gets: dict[int, Incoming]


class _Ground(NamedTuple):
    """What lies under all that a neighbour adds: the first value, or what this rank got itself."""

    tensor: torch.Tensor | None
    p: float
    since: int


class Window:
    """A window, held by the verbs.

    Every rank holds its own tensor and, for each in-neighbour, a *buffer*: what that neighbour has
    put there. Here a buffer is a value in thought: the newest version that the neighbour has
    published, on top of the first value while nothing was put or taken. All of it is guarded by one
    lock against other threads of this rank; other ranks need none.

    Args:
        context: The world.
        name: The window's name.
        number: How many windows were made before.
        tensor: The rank's own tensor, into which updates are written.
        zero_init: Whether buffers begin at zero, or as the rank's own tensor.

    Attributes:
        edges: Set once they are there.
        clock: Steps that this rank has made.
        p: The associated scalar of push-sum.
        step_of_update: How many updates were made: the round of a schedule.
        step_of_put: How many times this rank has published: the same.
    """

    edges: Edges

    def __init__(
        self, context: Context, name: str, number: int, tensor: torch.Tensor, *, zero_init: bool
    ) -> None:
        self.context, self.name, self.number, self.tensor = context, name, number, tensor
        self.lock = threading.RLock()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.clock = self.step_of_update = self.step_of_put = 0
        self.p = 1.0
        self._direct = tensor.is_cpu and tensor.is_contiguous()
        near = context.transport.visible
        arena = None if near is None else near.arena
        self._pool = Pool(arena, self.shape, self.dtype, self._in_use)
        self._zero_init = zero_init
        self._grounds: dict[int, _Ground] = {}
        self._updated: dict[int, int] = {}
        self._gets_made: dict[int, int] = {}
        self._read: dict[int, Shown] = {}
        self._made = time.monotonic()
        self._published: Buffer | None = None
        self.asked = False
        """Whether a neighbour on another machine has ever got something."""

    def open(self, edges: Edges) -> None:
        """Take the edges, and publish the first value."""
        self.edges = edges
        first = None if self._zero_init else self._host().clone()
        self._grounds = {s: _Ground(first, 0.0, 0) for s in edges.incoming}
        self._updated = dict.fromkeys(edges.incoming, 0)
        self._gets_made = dict.fromkeys(edges.incoming, 0)
        self.publish()

    @property
    def pulled(self) -> bool:
        """Whether a neighbour has ever got something, so that it is worth publishing for that."""
        return self.asked or any(edge.wanted() for edge in self.edges.shows.values())

    # what goes

    def put(
        self,
        tensor: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        add: bool,
        with_p: bool,
        step: int | None = None,
    ) -> WindowHandle:
        """Publish a tensor to neighbours, then scale it.

        Args:
            tensor: What is published.
            self_weight: By which it, and p, are multiplied in the end.
            weights: Of each neighbour.
            add: Whether it is added to what the neighbour has not taken yet, or overwrites it.
            with_p: Whether p goes along.
            step: This rank's step; one more than last time if not given.
        """
        with self.lock:
            self.clock = self.clock + 1 if step is None else step
            self.step_of_put += 1
            versions = {}
            with self._filled(tensor) as buffer:
                for peer in sorted(weights):
                    weight, edge = weights[peer], self.edges.outgoing[peer]
                    p = self.p * weight if with_p else 0.0
                    if add:
                        versions[peer] = edge.add(buffer, weight, p, self.clock, self._pool.room)
                    else:
                        versions[peer] = edge.put(buffer, weight, p, self.clock)
                if tensor is self.tensor and self.pulled:
                    self._let_get(buffer)
            for edge in self.edges.outgoing.values():
                edge.tick(self.clock)
            if self_weight != 1.0:
                with torch.no_grad():
                    tensor.mul_(self_weight)
            if with_p:
                self.p *= self_weight
        verb = "win_accumulate" if add else "win_put"
        return WindowHandle(self.context, f"{verb} {self.name!r}", self._missing(versions))

    def _missing(self, versions: dict[int, int]) -> list[tuple[int, Outgoing, int]]:
        return [(peer, self.edges.outgoing[peer], v) for peer, v in versions.items()]

    def publish(self) -> None:
        """Let neighbours get the rank's own tensor as it is now."""
        with self.lock, self._filled(self.tensor) as buffer:
            self._let_get(buffer)

    def _let_get(self, buffer: Buffer) -> None:
        buffer.hold()
        before, self._published = self._published, buffer
        if before is not None:
            before.drop()
        for edge in self.edges.shows.values():
            edge.put(buffer, 1.0, 0.0, self.clock)

    def published(self) -> tuple[torch.Tensor, int]:
        """A copy of what neighbours may get, and this rank's step; called by any thread."""
        while buffer := self._published:
            buffer.hold()
            try:
                if buffer is self._published:  # else it may have been used anew meanwhile
                    return buffer.tensor.clone(), self.clock
            finally:
                buffer.drop()
        raise RuntimeError("a window was read before it was opened")

    @contextmanager
    def _filled(self, tensor: torch.Tensor) -> Iterator[Buffer]:
        """A buffer with the values of a tensor, kept from being used for anything else."""
        buffer = self._pool.room()
        try:
            buffer.tensor.copy_(tensor.detach())
            yield buffer
        finally:
            buffer.drop()

    def _in_use(self) -> Iterator[Buffer]:
        for edges in (self.edges.outgoing, self.edges.shows):
            for edge in edges.values():
                yield from edge.in_use()

    # what comes

    def get(self, source: int, weight: float) -> None:
        """Put what a neighbour lets others get in place of what lies in its buffer."""
        edge = self.edges.gets[source]
        with self.lock:
            try:
                edge.take()  # so that the neighbour knows that somebody does
                shown = edge.look()
                if shown is not None:
                    self.lay_down(source, shown, weight)
            finally:
                edge.release()

    def lay_down(self, source: int, shown: Shown, weight: float) -> None:
        """Put what was got of a neighbour in place of what lies in its buffer; p stays."""
        edge = self.edges.incoming[source]
        with self.lock:
            scaled = torch.empty(self.shape, dtype=self.dtype)
            weighted(scaled, [(shown.tensor, weight)])
            _, p = self._content(source, take=True)
            edge.release()
            self._grounds[source] = _Ground(scaled, p, edge.taken)
            self._gets_made[source] += 1
            self._read[source] = shown._replace(version=edge.version())

    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool,
        clone: bool,
        with_p: bool,
    ) -> torch.Tensor:
        r"""Form :math:`w_0 x + \sum_j w_j b_j` over buffers.

        Args:
            self_weight: :math:`w_0`.
            weights: :math:`w_j` of neighbours.
            reset: Whether these buffers are zero afterwards; each value counts exactly once.
            clone: Whether the result is a new tensor, or replaces the rank's own.
            with_p: Whether p is mapped too.

        Returns:
            The rank's own tensor, or the new one.
        """
        with self.lock:
            own = self._host()
            terms: list[Term] = [(own, self_weight)]
            p = self.p * self_weight
            try:
                for source in sorted(weights):
                    found, share = self._content(source, take=reset)
                    terms += [(tensor, factor * weights[source]) for tensor, factor in found]
                    p += share * weights[source]
                out = torch.empty_like(own) if clone or not self._direct else own
                with torch.no_grad():
                    weighted(out, terms, shares=len(weights) + 1)
            finally:
                for source in weights:
                    self.edges.incoming[source].release()
            self._count(weights)
            if with_p:
                self.p = p
            return self._finish(out, clone=clone)

    def _finish(self, out: torch.Tensor, *, clone: bool) -> torch.Tensor:
        if clone:
            return out.to(self.tensor.device)
        if not self._direct:
            with torch.no_grad():
                self.tensor.copy_(out)
        if self.pulled or not self.step_of_put:
            self.publish()
        return self.tensor

    def _count(self, weights: Mapping[int, float]) -> None:
        self.step_of_update += 1
        for source, edge in self.edges.incoming.items():
            seen = self._read.get(source)
            whole = source not in weights or seen is None
            self._updated[source] = edge.version() if whole or seen is None else seen.version
            self._gets_made[source] = 0

    def _content(self, source: int, *, take: bool) -> tuple[list[Term], float]:
        """What lies in a neighbour's buffer, as terms of a sum, and its p."""
        edge, ground = self.edges.incoming[source], self._grounds.get(source)
        if take:
            shown = self._taken(source)
            self._grounds.pop(source, None)
        else:
            shown = edge.look()
            if shown is not None and shown.version <= edge.taken:
                shown = None
        terms: list[Term] = []
        p = 0.0
        if ground is not None and shown is not None and shown.floor > ground.since:
            ground = None
            self._grounds.pop(source, None)
        if ground is not None:
            p += ground.p
            if ground.tensor is not None:
                terms.append((ground.tensor, 1.0))
        if shown is not None:
            self._read[source] = shown
            terms.append((shown.tensor, shown.weight))
            p += shown.p
        return terms, p

    def _taken(self, source: int) -> Shown | None:
        """Take what a neighbour has published, once it is not adding to it."""
        edge = self.edges.incoming[source]
        possible, shown = edge.take()
        if not possible:
            patience = self.context.engine.patience(f"window {self.name!r}, which is added to,")
            attempt = 0
            while not possible:
                patience([source])
                self.context.transport.rest(attempt)
                attempt += 1
                possible, shown = edge.take()
        return shown

    def peek(self, source: int) -> torch.Tensor:
        """A copy of what lies in a neighbour's buffer."""
        with self.lock:
            out = torch.empty(self.shape, dtype=self.dtype)
            try:
                weighted(out, self._content(source, take=False)[0])
            finally:
                self.edges.incoming[source].release()
            return out.to(self.tensor.device)

    def versions(self) -> dict[int, int]:
        """How many times each neighbour's buffer was written since the last update."""
        with self.lock:
            return {
                source: edge.version() - self._updated[source] + self._gets_made[source]
                for source, edge in self.edges.incoming.items()
            }

    def staleness(self) -> dict[int, Staleness]:
        """How old what was last read of each neighbour is."""
        now = time.monotonic()
        with self.lock:
            found = {}
            for source, edge in self.edges.incoming.items():
                shown = self._read.get(source)
                version, clock, when = 0, 0, self._made
                if shown is not None:
                    version, clock, when = shown.version, shown.clock, shown.time
                steps, lag = max(0, edge.clock() - clock), self.clock - clock
                found[source] = Staleness(version, steps, max(0.0, now - when), lag)
            return found

    def _host(self) -> torch.Tensor:
        """The rank's own values on the host."""
        own = self.tensor.detach()
        return own if self._direct else own.to("cpu").contiguous()
