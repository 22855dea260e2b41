"""Window of one rank: publishes its tensor, and averages it with tensors of its neighbours."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.context import Context
from asyncddp.device.stream_registry import streams_of
from asyncddp.errors import AsyncDDPError, PeerLeftError
from asyncddp.kernels.cpu_weighted_sum import WeightedTensor
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.tensors.allocation import detached_copy
from asyncddp.topology import Neighbors, Schedule
from asyncddp.windows.departure_detector import CONCLUDED
from asyncddp.windows.device_staging import DeviceStaging
from asyncddp.windows.edge import PublishedSnapshot, RefCountedBuffer
from asyncddp.windows.mutex import WindowMutex
from asyncddp.windows.nonblocking_handle import WindowHandle
from asyncddp.windows.receive_buffers import ReceiveBuffers, Staleness
from asyncddp.windows.staging import (
    BufferPool,
    CompressedStaging,
    PendingPublish,
    SentMessages,
    StoredForm,
    SynchronousTensorStaging,
    UndeliveredMessage,
)
from asyncddp.windows.window_edges import WindowEdges

_ROUNDING = 1e-6  # by which weights of an average may miss 1


class Window:
    """One rank's part of a window: its own tensor, and one receive buffer per in-neighbour.

    One lock guards it against other threads of this rank; other ranks need none. ``number`` counts
    the windows that were made before. Receive buffers are initialised with zero for ``zero_init``,
    otherwise with the rank's own tensor.
    """

    edges: WindowEdges
    mutex: WindowMutex
    _send: Callable[..., list[UndeliveredMessage]]  # :meth:`WindowEdges.send`

    def __init__(
        self,
        context: Context,
        name: str,
        number: int,
        tensor: torch.Tensor,
        schedule: Schedule,
        *,
        zero_init: bool,
        codec: TensorCompressor | None = None,
    ) -> None:
        self.context, self.name, self.number, self.tensor = context, name, number, tensor
        self.lock = threading.RLock()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.stored = StoredForm(tensor, codec)
        self.clock = 0  # steps that this rank has made, plus CONCLUDED where none follow
        self.step_of_update = self.step_of_put = 0  # how many were made: the round of a schedule
        self.p, self.with_p = 1.0, False  # with_p: the operations of users map p as the tensor
        self.end: AsyncDDPError | None = None  # why the window cannot be used any more
        self._rounds = [schedule.neighbors(context.rank, k) for k in range(schedule.period or 1)]
        self.holds_integers = not tensor.is_floating_point()
        group, what = context.transport.window_group, f"window {name!r}"
        arena = None if group is None else group.arena
        self._pool = BufferPool(arena, self.stored.shape, self.stored.dtype)
        self._staging = SynchronousTensorStaging(self._pool)
        if codec is not None:
            self._staging = CompressedStaging(self._pool, codec)
        elif (streams := streams_of(tensor)) is not None:
            self._staging = DeviceStaging(self._pool, streams, context.engine, self.lock, what)
        self._zero_init = zero_init
        self._unconfirmed: dict[int, UndeliveredMessage] = {}
        self._receive_buffers = partial(
            ReceiveBuffers, shape=self.shape, dtype=self.dtype, read=self.stored.read
        )
        self._buffers = self._receive_buffers({}, None)

    def open(self, edges: WindowEdges) -> None:
        """Set the edges, and publish the initial value."""
        self.edges, self._send = edges, edges.send
        self._pool.edges = [*edges.outgoing.values(), *edges.get_writers.values()]

        def publish_buffer(buffer: RefCountedBuffer) -> SentMessages:
            first = None if self._zero_init else detached_copy(self.stored.read(buffer.tensor))
            self._buffers = self._receive_buffers(edges.incoming, first)
            return edges.publish_for_gets(buffer, 1.0, self.clock)

        with self.lock:
            pending = self._staging.publish(self.tensor, 1.0, publish_buffer)
        WindowHandle(self, "win_create", pending).wait()

    def close(self, end: AsyncDDPError) -> None:
        """Free all memory; peers must have stopped reading this window."""
        with self.lock:
            self.end = end
            self.edges = WindowEdges({})
            self._send = self.edges.send  # the old edges hold buffers
            self._unconfirmed.clear()
            self._staging.close()
            self._pool.close()
            self._buffers = self._receive_buffers({}, None)

    def require_open(self) -> None:
        """Raise if the window was freed: a UsageError if here, or a PeerError if by a peer."""
        if self.end is not None:
            raise self.end

    def neighbors_at(self, step: int) -> Neighbors:
        """Return the neighbours of this rank in a round of the topology."""
        return self._rounds[step % len(self._rounds)]

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
        """Publish a tensor to neighbours, then multiply it by ``self_weight``, and p as well.

        With ``add``, it is added to the tensors that they have not taken; else it replaces them. p
        is multiplied only with ``with_p``. ``step`` is this rank's step count, by default the next.
        """
        self._staging.throttle()
        with self.lock:
            self.require_open()
            before = self.steps
            clock = before + 1 if step is None else step
            p, mine = self.p if with_p else 0.0, self.tensor
            own = tensor is mine or (  # or a view of exactly the same memory
                tensor.data_ptr() == mine.data_ptr() and tensor.stride() == mine.stride()
            )
            acquire_buffer = self._pool.acquire_buffer if add else None

            def publish_buffer(buffer: RefCountedBuffer) -> list[UndeliveredMessage]:
                messages = self._send(buffer, weights, clock, p, acquire_buffer)
                if own:
                    biased_by = p if with_p else 1.0
                    self.edges.publish_for_gets(buffer, self_weight, before, biased_by)
                self._unconfirmed.update((one[0], one) for one in messages)
                return messages

            pending = self._staging.publish(tensor, self_weight, publish_buffer)
            self.clock = clock
            self.step_of_put += 1
            if with_p:
                self.p *= self_weight
        return WindowHandle(self, "win_accumulate" if add else "win_put", pending)

    def publish(self) -> PendingPublish:
        """Publish a copy of this rank's own tensor for neighbours' gets."""
        with self.lock:
            self.require_open()
            offer = partial(self.edges.publish_for_gets, weight=1.0, clock=self.clock, p=self.p)
            return self._staging.publish(self.tensor, 1.0, offer)

    def flush(self) -> WindowHandle:
        """Return a handle that is done once neighbours see all earlier puts."""
        with self.lock:
            self.require_open()
            pending = self._staging.run_after(lambda: list(self._unconfirmed.values()))
            return WindowHandle(self, "win_flush", pending)

    def tell(self, clock: int, but: Collection[int] = ()) -> WindowHandle:
        """Send the step count to all neighbours except ``but``, after all earlier puts."""

        def send_step_count() -> tuple[UndeliveredMessage, ...]:
            for peer, edge in self.edges.outgoing.items():
                if peer not in but:
                    edge.tell(clock)
            return ()

        with self.lock:
            return WindowHandle(self, "win_flush", self._staging.run_after(send_step_count))

    def conclude(self) -> WindowHandle:
        """Announce to neighbours that no further step follows; publish the own tensor for gets."""
        with self.lock:
            self.clock = CONCLUDED + self.steps
            self.publish()
        return self.tell(self.clock)

    def resume(self) -> None:
        """Announce to neighbours that further steps follow after :meth:`conclude`."""
        with self.lock:
            self.clock = self.steps
        self.tell(self.clock)

    @property
    def steps(self) -> int:
        """Number of steps that this rank has made, without CONCLUDED."""
        return self.clock % CONCLUDED

    # reading

    def get(self, source: int, weight: float) -> None:
        """Get a neighbour's tensor from shared memory into its receive buffer."""
        with self.lock:
            self.require_open()
            edge = self.edges.get_readers[source]
            edge.announce_gets()
            try:
                snapshot = edge.look()
                if snapshot is not None:
                    self.store_get_result(source, snapshot, weight)
            finally:
                edge.release()

    def store_get_result(self, source: int, snapshot: PublishedSnapshot, weight: float) -> None:
        """Replace the value of a neighbour's buffer by a tensor that was got; p is kept."""
        with self.lock:
            self.require_open()
            self._buffers.store_get_result(source, snapshot, weight)

    def update(
        self,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool,
        clone: bool,
        with_p: bool,
    ) -> torch.Tensor:
        r"""Average x with the receive buffers: :math:`w_0 x + \sum_j w_j b_j`.

        The result replaces x, or is a new tensor with ``clone``. ``reset`` zeroes these buffers, so
        that each value counts exactly once. ``with_p`` averages p, too. Failed neighbours are left
        out.
        """
        self._staging.throttle()
        with self.lock:
            self.require_open()
            self_weight, weights = self._of_survivors(self_weight, weights, reset=reset)
            terms: list[WeightedTensor] = []
            p = self.p * self_weight
            try:
                for source, content in self._buffers.contents(weights, take=reset).items():
                    factor = weights[source]
                    terms += [(tensor, weight * factor) for tensor, weight in content.terms]
                    p += content.p * factor
                result = self._staging.average_into(
                    self.tensor, self_weight, terms, len(weights) + 1, clone=clone
                )
            finally:
                self._buffers.release(weights)
            self.step_of_update += 1
            self._buffers.updated(weights)
            if with_p:
                self.p = p
            if not clone and (not self.step_of_put or self.edges.is_read_by_gets):
                self.publish()
            return result

    def _of_survivors(
        self, self_weight: float, weights: Mapping[int, float], *, reset: bool
    ) -> tuple[float, Mapping[int, float]]:
        """Leave out failed neighbours; if weights sum to 1, the own weight takes over theirs.

        A sum with ``reset``, such as push-sum's, still includes once what they had published.
        """
        failed = [source for source in weights if self.context.engine.has_failed(source)]
        if not failed:
            return self_weight, weights
        row = WeightRow(self_weight, weights, {})
        if abs(math.fsum([self_weight, *weights.values()]) - 1.0) < _ROUNDING:
            row = row.without(failed)
            return row.self_weight, row.src_weights
        left_out = self.unreadable(failed) if reset else failed
        return self_weight, row.without(left_out).src_weights

    def read_buffer(self, source: int) -> torch.Tensor:
        """Return a copy of a neighbour's buffer."""
        with self.lock:
            self.require_open()
            try:
                terms = self._buffers.content(source, take=False).terms
                return self._staging.new_sum(self.tensor, terms)
            finally:
                self._buffers.release([source])

    def unreadable(self, sources: Iterable[int]) -> list[int]:
        """Return the neighbours that have exited such that their last tensor is lost."""
        gone = []
        for source in sources:
            try:
                self.read_buffer(source)
            except PeerLeftError:
                gone.append(source)
        return gone

    def versions(self) -> dict[int, int]:
        """Return the number of writes to each neighbour's buffer since the last update."""
        with self.lock:
            return self._buffers.versions()

    def staleness(self) -> dict[int, Staleness]:
        """Return the staleness of the value last read from each neighbour."""
        with self.lock:
            return self._buffers.staleness(self.steps)

    def read_step(self, source: int) -> int:
        """Return the step count of the value last read from a neighbour; see ``CONCLUDED``."""
        with self.lock:
            return self._buffers.last_read(source)[1]

    def known_steps_of(self, source: int, *, got: bool) -> int:
        """Return a neighbour's last known step count, by gets or by puts; see ``CONCLUDED``."""
        if not got:
            return self.edges.incoming[source].clock()
        reader = self.edges.get_readers.get(source)
        return self.read_step(source) if reader is None else reader.clock()
