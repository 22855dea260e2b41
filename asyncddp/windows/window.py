"""One window on one rank: what it publishes, what its neighbours have, and how old that is."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from asyncddp.context import Context
from asyncddp.errors import AsyncDDPError, PeerLeftError
from asyncddp.memory.allocate import copied
from asyncddp.memory.dtypes import DTYPES, Kind
from asyncddp.memory.shared import Arena
from asyncddp.windows.board import Inlet
from asyncddp.windows.buffers import Buffers, Staleness
from asyncddp.windows.contract import Buffer, Incoming, Outgoing, Shown
from asyncddp.windows.departures import CONCLUDED
from asyncddp.windows.device_side import Device, DeviceSide
from asyncddp.windows.handle import WindowHandle
from asyncddp.windows.pool import Pool
from asyncddp.windows.side import HostSide, Publication, Side, Version
from asyncddp.windows.sums import Term
from topology import Neighbors, Schedule

__all__ = ["Edges", "Window"]


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
    gets: dict[int, Inlet]


class Window:
    """A window, held by the verbs.

    Every rank holds its own tensor and, for each in-neighbour, a *buffer*: what that neighbour has
    put there. All of it is guarded by one lock against other threads of this rank; other ranks need
    none.

    Args:
        context: The world.
        name: The window's name.
        number: How many windows were made before.
        tensor: The rank's own tensor, into which updates are written.
        schedule: The topology along whose edges it lies.
        arena: Memory that peers see; None where there is no such peer.
        device: On which the tensor lies; None on the host.
        zero_init: Whether buffers begin at zero, or as the rank's own tensor.

    Attributes:
        edges: Set once they are there.
        clock: Steps that this rank has made.
        p: The associated scalar of push-sum.
        step_of_update: How many updates were made: the round of a schedule.
        step_of_put: How many times this rank has published: the same.
        end: The error that says why the window is of no use any more.
        whole: Whether it holds integers.
    """

    edges: Edges
    _buffers: Buffers

    def __init__(
        self,
        context: Context,
        name: str,
        number: int,
        tensor: torch.Tensor,
        schedule: Schedule,
        arena: Arena | None,
        device: Device | None = None,
        *,
        zero_init: bool,
    ) -> None:
        self.context, self.name, self.number, self.tensor = context, name, number, tensor
        self.lock = threading.RLock()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.clock = self.step_of_update = self.step_of_put = 0
        self.p = 1.0
        self.end: AsyncDDPError | None = None
        self._rounds = [schedule.neighbors(context.rank, k) for k in range(schedule.period or 1)]
        self.whole = DTYPES[tensor.dtype].kind is Kind.INTEGER
        self._pool = Pool(arena, self.shape, self.dtype)
        self._side: Side = HostSide(self._pool)
        if device is not None:
            what = f"window {name!r}"
            self._side = DeviceSide(self._pool, device, context.engine, self.lock, what)
        self._zero_init = zero_init
        self._published: tuple[Buffer, float] | None = None
        self._travelling: dict[int, Version] = {}
        self.asked = False
        """Whether a neighbour on another machine has ever got something."""

    def open(self, edges: Edges) -> None:
        """Take the edges, and publish the first value."""
        self.edges = edges
        self._pool.edges = [*edges.outgoing.values(), *edges.shows.values()]
        self._buffers = Buffers({}, None, self.shape, self.dtype)

        def show(buffer: Buffer) -> tuple[Version, ...]:
            """Let it be what lies in all buffers as well."""
            first = None if self._zero_init else copied(buffer.tensor)
            self._buffers = Buffers(edges.incoming, first, self.shape, self.dtype)
            self._let_get(buffer, 1.0, self.clock)
            return ()

        with self.lock:
            publication = self._side.publish(self.tensor, 1.0, show)
        WindowHandle(self, "win_create", publication).wait()

    def close(self, end: AsyncDDPError) -> None:
        """Let go of all memory; nobody reads what this rank has published any more."""
        with self.lock:
            self.end = end
            self.edges = Edges({}, {}, {}, {})
            self._travelling.clear()
            self._side.close()
            self._published = None
            self._pool.close()
            self._buffers = Buffers({}, None, self.shape, self.dtype)

    def insist(self) -> None:
        """Refuse to go on with a window that was freed, here or by a peer.

        Raises:
            UsageError: It was freed here.
            PeerError: It was freed by a peer.
        """
        if self.end is not None:
            raise self.end

    def near(self, step: int) -> Neighbors:
        """The neighbours of this rank in a round of the topology."""
        return self._rounds[step % len(self._rounds)]

    @property
    def pulled(self) -> bool:
        """Whether a neighbour has ever got something, so that it is worth publishing for that."""
        return self.asked or any([edge.wanted() for edge in self.edges.shows.values()])

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
        self._side.keep_up()
        with self.lock:
            self.insist()
            before = self.steps
            clock = before + 1 if step is None else step
            p, own = self.p if with_p else 0.0, self._is_own(tensor)

            def show(buffer: Buffer) -> list[Version]:
                """Let those neighbours see it, and others get it."""
                versions = self._sent(buffer, weights, clock, p, add=add)
                if own:
                    self._let_get(buffer, self_weight, before)
                self._travelling.update((one[0], one) for one in versions)
                return versions

            publication = self._side.publish(tensor, self_weight, show)
            self.clock = clock
            self.step_of_put += 1
            if with_p:
                self.p *= self_weight
        return WindowHandle(self, "win_accumulate" if add else "win_put", publication)

    def _sent(
        self, buffer: Buffer, weights: Mapping[int, float], clock: int, p: float, *, add: bool
    ) -> list[Version]:
        """Publish to those neighbours, and tell all the time; versions that have to travel."""
        versions = []
        for peer, edge in self.edges.outgoing.items():
            weight = weights.get(peer)
            if weight is None:
                edge.tick(clock)
                continue
            if add:
                version = edge.add(buffer, weight, p * weight, clock, self._pool.room)
            else:
                version = edge.put(buffer, weight, p * weight, clock)
            if not edge.prompt:
                versions.append((peer, edge, version))
        return versions

    def flush(self) -> WindowHandle:
        """Done once neighbours can see all that was put so far."""
        with self.lock:
            self.insist()
            publication = self._side.then(lambda: list(self._travelling.values()))
            return WindowHandle(self, "win_flush", publication)

    def tell(self, clock: int, but: Collection[int] = ()) -> WindowHandle:
        """Tell neighbours how many steps were made, after all that was put before, but some."""

        def told() -> tuple[Version, ...]:
            """Tell each of them."""
            for peer, edge in self.edges.outgoing.items():
                if peer not in but:
                    edge.tell(clock)
            return ()

        with self.lock:
            return WindowHandle(self, "win_flush", self._side.then(told))

    def conclude(self) -> WindowHandle:
        """Tell neighbours that no step follows for now, and let them get what is here."""
        with self.lock:
            self.clock = CONCLUDED + self.steps
            self.publish()
        return self.tell(self.clock)

    def resume(self) -> None:
        """Tell neighbours that steps follow after all; a step says so as well."""
        with self.lock:
            self.clock = self.steps
        self.tell(self.clock)

    @property
    def steps(self) -> int:
        """Steps that this rank has made, also where no more follow."""
        return self.clock % CONCLUDED

    def publish(self) -> Publication:
        """Let neighbours get the rank's own tensor as it is now."""
        with self.lock:
            self.insist()
            clock = self.clock

            def show(buffer: Buffer) -> tuple[Version, ...]:
                """Let them get it."""
                self._let_get(buffer, 1.0, clock)
                return ()

            return self._side.publish(self.tensor, 1.0, show)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the window's own, or another view of just the same."""
        own = self.tensor
        return tensor is own or (
            tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride()
        )

    def _let_get(self, buffer: Buffer, weight: float, clock: int) -> None:
        """Let neighbours get ``weight * buffer``, of some step."""
        buffer.hold()
        before, self._published = self._published, (buffer, weight)
        if before is not None:
            before[0].drop()
        for edge in self.edges.shows.values():
            edge.put(buffer, weight, 0.0, clock)

    def published(self) -> tuple[torch.Tensor, int] | None:
        """A copy of what neighbours may get, and this rank's step; called by any thread."""
        while published := self._published:
            buffer, weight = published
            buffer.hold()
            try:
                if published is self._published:  # else it may have been used anew meanwhile
                    return buffer.tensor * (int(weight) if self.whole else weight), self.clock
            finally:
                buffer.drop()
        return None

    # what comes

    def get(self, source: int, weight: float) -> None:
        """Put what a neighbour lets others get in place of what lies in its buffer."""
        with self.lock:
            self.insist()
            edge = self.edges.gets[source]
            edge.want()
            try:
                shown = edge.look()
                if shown is not None:
                    self.lay_down(source, shown, weight)
            finally:
                edge.release()

    def lay_down(self, source: int, shown: Shown, weight: float) -> None:
        """Put what was got of a neighbour in place of what lies in its buffer; p stays."""
        with self.lock:
            self.insist()
            self._buffers.lay_down(source, shown, weight)

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
        self._side.keep_up()
        with self.lock:
            self.insist()
            terms: list[Term] = []
            p = self.p * self_weight
            try:
                for source, content in self._buffers.contents(weights, take=reset).items():
                    factor = weights[source]
                    terms += [(tensor, weight * factor) for tensor, weight in content.terms]
                    p += content.p * factor
                result = self._side.mix(
                    self.tensor, self_weight, terms, len(weights) + 1, clone=clone
                )
            finally:
                self._buffers.release(weights)
            self.step_of_update += 1
            self._buffers.updated(weights)
            if with_p:
                self.p = p
            if not clone and (not self.step_of_put or self.pulled):
                self.publish()
            return result

    def peek(self, source: int) -> torch.Tensor:
        """A copy of what lies in a neighbour's buffer."""
        with self.lock:
            self.insist()
            try:
                terms = self._buffers.content(source, take=False).terms
                return self._side.bring(self.tensor, terms)
            finally:
                self._buffers.release([source])

    def unreadable(self, sources: Iterable[int]) -> list[int]:
        """Which neighbours have ended so that what they published last cannot be read any more."""
        gone = []
        for source in sources:
            try:
                self.peek(source)
            except PeerLeftError:
                gone.append(source)
        return gone

    def versions(self) -> dict[int, int]:
        """How many times each neighbour's buffer was written since the last update."""
        with self.lock:
            return self._buffers.versions()

    def staleness(self) -> dict[int, Staleness]:
        """How old what was last read of each neighbour is."""
        with self.lock:
            found = self._buffers.staleness(self.steps)
        for source, one in found.items():  # neighbours that have concluded have no more steps
            lag = one.lag + CONCLUDED if one.lag <= -(CONCLUDED // 2) else one.lag
            found[source] = one._replace(steps=one.steps % CONCLUDED, lag=lag)
        return found

    def read_step(self, source: int) -> int:
        """Of which step of a neighbour is what was read last; 0 if nothing was.

        Where no step follows, CONCLUDED is added.
        """
        with self.lock:
            return self.steps - self._buffers.staleness(self.steps)[source].lag

    def steps_of(self, source: int, *, got: bool) -> int:
        """How many steps a neighbour has made, as far as is known here.

        Where no step follows, CONCLUDED is added.

        Args:
            source: The neighbour.
            got: Whether its tensor is got, or comes by its puts.
        """
        if not got:
            return self.edges.incoming[source].clock()
        shows = self.edges.gets.get(source)
        return self.read_step(source) if shows is None else shows.clock()
