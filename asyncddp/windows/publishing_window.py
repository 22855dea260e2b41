"""Publishing half of a rank's window: its own tensor, puts to neighbours, and what they may get."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch

from asyncddp.context import Context
from asyncddp.errors import AsyncDDPError
from asyncddp.shm.arena import Arena
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.windows.buffer_pool import BufferPool
from asyncddp.windows.departure_detector import CONCLUDED
from asyncddp.windows.device_staging import DeviceResources, DeviceStaging
from asyncddp.windows.edge import RefCountedBuffer
from asyncddp.windows.nonblocking_handle import WindowHandle
from asyncddp.windows.receive_buffers import ReceiveBuffers
from asyncddp.windows.staging import (
    HostTensorStaging,
    PendingPublish,
    TensorStaging,
    UndeliveredVersion,
)
from asyncddp.windows.window_edges import WindowEdges
from topology import Neighbors, Schedule


class PublishingWindow:
    """Base class of a rank's window: sends tensors to neighbours by put, and offers tensors to get.

    One lock guards it against other threads of this rank; other ranks need none.

    Args:
        context: The rank's context.
        name: The window's name.
        number: How many windows were made before.
        tensor: The rank's own tensor, into which updates are written.
        schedule: The topology whose edges it has.
        arena: Shared memory; None if no peer shares it.
        device: The device of the tensor; None on the host.
        zero_init: Initialise buffers with zero; with the rank's own tensor otherwise.

    Attributes:
        edges: Set by :meth:`open`.
        clock: Steps that this rank has made.
        p: The associated scalar of push-sum.
        step_of_update: How many updates were made: the round of a schedule.
        step_of_put: How many times this rank has published: the same.
        end: The error that says why the window cannot be used any more.
        holds_integers: True if its dtype is one of integers.
    """

    edges: WindowEdges
    _buffers: ReceiveBuffers

    def __init__(
        self,
        context: Context,
        name: str,
        number: int,
        tensor: torch.Tensor,
        schedule: Schedule,
        arena: Arena | None,
        device: DeviceResources | None = None,
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
        self.holds_integers = DTYPES[tensor.dtype].kind is DtypeKind.INTEGER
        self._pool = BufferPool(arena, self.shape, self.dtype)
        self._staging: TensorStaging = HostTensorStaging(self._pool)
        if device is not None:
            what = f"window {name!r}"
            self._staging = DeviceStaging(self._pool, device, context.engine, self.lock, what)
        self._zero_init = zero_init
        self._published: tuple[RefCountedBuffer, float] | None = None
        self._unconfirmed: dict[int, UndeliveredVersion] = {}
        self.remote_get_received = False
        """True once a neighbour on another machine has got something."""

    def open(self, edges: WindowEdges) -> None:
        """Set the edges, and publish the initial value."""
        self.edges = edges
        self._pool.edges = [*edges.outgoing.values(), *edges.get_writers.values()]
        self._buffers = ReceiveBuffers({}, None, self.shape, self.dtype)

        def publish_buffer(buffer: RefCountedBuffer) -> tuple[UndeliveredVersion, ...]:
            """Publish the buffer for gets, and use it as the initial value of all buffers."""
            first = None if self._zero_init else detached_copy(buffer.tensor)
            self._buffers = ReceiveBuffers(edges.incoming, first, self.shape, self.dtype)
            self._publish_for_gets(buffer, 1.0, self.clock)
            return ()

        with self.lock:
            pending = self._staging.publish(self.tensor, 1.0, publish_buffer)
        WindowHandle(self, "win_create", pending).wait()

    def close(self, end: AsyncDDPError) -> None:
        """Free all memory; nobody reads what this rank has published any more."""
        with self.lock:
            self.end = end
            self.edges = WindowEdges({}, {}, {}, {})
            self._unconfirmed.clear()
            self._staging.close()
            self._published = None
            self._pool.close()
            self._buffers = ReceiveBuffers({}, None, self.shape, self.dtype)

    def require_open(self) -> None:
        """Raise if the window was freed, here or by a peer.

        Raises:
            UsageError: It was freed here.
            PeerError: It was freed by a peer.
        """
        if self.end is not None:
            raise self.end

    def neighbors_at(self, step: int) -> Neighbors:
        """Return the neighbours of this rank in a round of the topology."""
        return self._rounds[step % len(self._rounds)]

    @property
    def is_read_by_gets(self) -> bool:
        """True if a neighbour has ever got something, so that updates are published for gets."""
        return self.remote_get_received or any(
            [edge.reader_gets() for edge in self.edges.get_writers.values()]
        )

    # publishing

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
            add: Add it to what the neighbour has not taken yet; overwrite otherwise.
            with_p: Send p as well.
            step: This rank's step; one more than last time if not given.
        """
        self._staging.throttle()
        with self.lock:
            self.require_open()
            before = self.steps
            clock = before + 1 if step is None else step
            p, own = self.p if with_p else 0.0, self._is_own(tensor)

            def publish_buffer(buffer: RefCountedBuffer) -> list[UndeliveredVersion]:
                """Publish the buffer to those neighbours, and for gets."""
                versions = self._sent(buffer, weights, clock, p, add=add)
                if own:
                    self._publish_for_gets(buffer, self_weight, before)
                self._unconfirmed.update((one[0], one) for one in versions)
                return versions

            pending = self._staging.publish(tensor, self_weight, publish_buffer)
            self.clock = clock
            self.step_of_put += 1
            if with_p:
                self.p *= self_weight
        return WindowHandle(self, "win_accumulate" if add else "win_put", pending)

    def _sent(
        self,
        buffer: RefCountedBuffer,
        weights: Mapping[int, float],
        clock: int,
        p: float,
        *,
        add: bool,
    ) -> list[UndeliveredVersion]:
        """Publish to neighbours, and the step count to all; return versions sent by message."""
        versions = []
        for peer, edge in self.edges.outgoing.items():
            weight = weights.get(peer)
            if weight is None:
                edge.set_clock(clock)
                continue
            if add:
                version = edge.add(buffer, weight, p * weight, clock, self._pool.acquire_buffer)
            else:
                version = edge.put(buffer, weight, p * weight, clock)
            if not edge.visible_at_once:
                versions.append((peer, edge, version))
        return versions

    def flush(self) -> WindowHandle:
        """Return a handle that is done once neighbours can see all that was put so far."""
        with self.lock:
            self.require_open()
            pending = self._staging.run_after(lambda: list(self._unconfirmed.values()))
            return WindowHandle(self, "win_flush", pending)

    def tell(self, clock: int, but: Collection[int] = ()) -> WindowHandle:
        """Tell neighbours, except some, how many steps were made, after all earlier puts."""

        def send_step_count() -> tuple[UndeliveredVersion, ...]:
            """Send the step count to each of them."""
            for peer, edge in self.edges.outgoing.items():
                if peer not in but:
                    edge.tell(clock)
            return ()

        with self.lock:
            return WindowHandle(self, "win_flush", self._staging.run_after(send_step_count))

    def conclude(self) -> WindowHandle:
        """Tell neighbours that no step follows for now, and publish the own tensor for gets."""
        with self.lock:
            self.clock = CONCLUDED + self.steps
            self.publish()
        return self.tell(self.clock)

    def resume(self) -> None:
        """Tell neighbours that steps follow after all; a step tells them as well."""
        with self.lock:
            self.clock = self.steps
        self.tell(self.clock)

    @property
    def steps(self) -> int:
        """Steps that this rank has made, also where no more follow."""
        return self.clock % CONCLUDED

    def publish(self) -> PendingPublish:
        """Publish the rank's own tensor, as it is now, for gets."""
        with self.lock:
            self.require_open()
            clock = self.clock

            def publish_buffer(buffer: RefCountedBuffer) -> tuple[UndeliveredVersion, ...]:
                """Publish the buffer for gets."""
                self._publish_for_gets(buffer, 1.0, clock)
                return ()

            return self._staging.publish(self.tensor, 1.0, publish_buffer)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is the window's own, or a view of exactly the same memory."""
        own = self.tensor
        return tensor is own or (
            tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride()
        )

    def _publish_for_gets(self, buffer: RefCountedBuffer, weight: float, clock: int) -> None:
        """Publish ``weight * buffer``, of some step, for gets."""
        buffer.hold()
        before, self._published = self._published, (buffer, weight)
        if before is not None:
            before[0].drop()
        for edge in self.edges.get_writers.values():
            edge.put(buffer, weight, 0.0, clock)

    def published(self) -> tuple[torch.Tensor, int] | None:
        """Return a copy of what neighbours may get, and this rank's step; called by any thread."""
        while published := self._published:
            buffer, weight = published
            buffer.hold()
            try:
                if published is self._published:  # else it may have been used anew meanwhile
                    return buffer.tensor * (
                        int(weight) if self.holds_integers else weight
                    ), self.clock
            finally:
                buffer.drop()
        return None
