"""NCCL communicator with a CUDA stream for its calls, opened and closed in separate threads.

NCCL calls that wait for other ranks (opening, destroying) run in separate threads, so that the
caller does not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from asyncddp.config import HARDWARE_QUEUES
from asyncddp.device.stream_interfaces import DeviceEvent, DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.transport.cuda.nccl.cupy_bindings import (
    CHANNELS,
    NCCL_ERRORS,
    CupyBindings,
    StreamContext,
    positive_setting,
)

logger = logging.getLogger("asyncddp")
BYTE = 1  # ncclUint8
_DEFAULT_BUDGET = 8  # communicators where it is not known how large a GPU is
_DEFAULT_QUEUES = 8  # that CUDA opens unless it is told how many
_OTHER_STREAMS = 6  # the caller's, three of the library, two of collectives
_CLOSE_TIMEOUT = 2.0  # seconds for NCCL to end; then it is left to its thread

NCCLCall: TypeAlias = Callable[[Any, int], None]
"""NCCL call to be enqueued: a function of cupy's communicator and a stream's address."""


def communicator_budget(device: torch.device) -> threading.Semaphore:
    """Make the semaphore that limits a rank's number of pair communicators (``point_to_point``)."""
    if device.type != "cuda":
        return threading.Semaphore(_DEFAULT_BUDGET)
    channels = positive_setting("NCCL_MAX_P2P_NCHANNELS", CHANNELS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    fitting = max(1, processors // (2 * channels))
    queues = positive_setting("CUDA_DEVICE_MAX_CONNECTIONS", _DEFAULT_QUEUES)
    queued = max(0, queues - _OTHER_STREAMS)
    if queued < fitting:
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is %d, so messages go by NCCL to %d peers at most; set it "
            "to %d in the environment of all ranks, or call init() before CUDA is used",
            queues,
            queued,
            HARDWARE_QUEUES,
        )
    return threading.Semaphore(min(fitting, queued))


class NCCLCommunicator:
    """This rank's end of an NCCL communicator, with its own CUDA stream.

    :attr:`why` is the reason why it is broken or closed; None while it is usable.

    References:
        NCCL's documentation, "CUDA Stream Semantics" and "Error handling and communicator abort".
    """

    def __init__(self, streams: DeviceStreams, current: StreamContext, handle: Any) -> None:
        self._streams, self._current, self._handle = streams, current, handle
        self._last: DeviceEvent | None = None
        self._watched: deque[tuple[str, DeviceEvent]] = deque()
        self._progressed = 0.0  # when the first of them became the first
        self.why: str | None = None

    @classmethod
    def open(
        cls, library: CupyBindings, streams: DeviceStreams, size: int, unique_id: bytes, rank: int
    ) -> NCCLCommunicator:
        """Open a communicator, waiting for all its ranks; raise a RuntimeError if NCCL fails."""
        current, join = library.stream(streams.device), library.nccl.NcclCommunicator
        with current():  # which makes its device the current one
            try:
                handle = join(size, unique_id, rank)
            except TypeError:  # cupy before version 14 takes the id as signed numbers
                signed = tuple(value - 256 if value > 127 else value for value in unique_id)
                handle = join(size, signed, rank)
        return cls(streams, current, handle)

    def enter(
        self,
        what: str,
        call: NCCLCall,
        tensors: Iterable[torch.Tensor],
        after: Iterable[DeviceEvent],
    ) -> DeviceEvent:
        """Enqueue a call on the communicator's stream after some events; return an event after it.

        If NCCL fails, the communicator is broken, which raises a PeerError.
        """
        streams = self._streams
        with self._current():
            for event in after:
                streams.wait_event(StreamRole.CALLER, event)
            for tensor in tensors:
                streams.record_stream(tensor, StreamRole.CALLER)
            try:
                call(self._handle, streams.stream_pointer(StreamRole.CALLER))
            except NCCL_ERRORS as problem:
                self.abort(f"{what} could not be started: {problem}")
                raise PeerError(str(self.why)) from problem
            self._last = streams.record_event(StreamRole.CALLER)
        return self._last

    def order_compute(self, what: str, event: DeviceEvent) -> None:
        """Make the compute stream wait for a call that all its ranks have posted, and watch it."""
        self._streams.wait_event(StreamRole.COMPUTE, event)
        if not self._watched:
            self._progressed = time.monotonic()
        self._watched.append((what, event))

    def watch(self, timeout: float) -> bool:
        """Return whether calls are still running on the device; queries at most one event.

        It aborts after an NCCL error, or if no call has ended for ``timeout`` seconds.
        """
        if self._watched and self._watched[0][1].done():
            self._watched.popleft()
            self._progressed = time.monotonic()
        if not self._watched or self.failed() is not None:
            return False
        if time.monotonic() - self._progressed > timeout:
            what = self._watched[0][0]
            self.abort(f"{what}, which all its ranks had posted, has not ended in {timeout:g} s")
        return self.why is None

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate bytes on the communicator's stream, without waiting for other streams."""
        with self._current():
            return empty((size,), torch.uint8, self._streams.device)

    def failed(self) -> str | None:
        """Check for asynchronous NCCL errors, and abort after one; return the reason."""
        if self.why is None:
            try:
                self._handle.check_async_error()
            except NCCL_ERRORS as problem:
                self.abort(f"NCCL reports: {problem}")
        return self.why

    def abort(self, why: str) -> None:
        """Abort the communicator and its work on the device."""
        if self.why is None:
            self.why = why
            self._watched.clear()
            run_in_threads([self._handle.abort], self._streams)

    def closer(self) -> Callable[[], None]:
        """Return the function that frees it: ``destroy``, or ``abort`` while work is running.

        Both may wait for the other ranks, so that the caller runs it in a thread.
        """
        if self.why is not None:
            return lambda: None
        self.why = "it was closed"
        idle = self._last is None or self._last.done()
        end: Callable[[], None] = self._handle.destroy if idle else self._handle.abort
        return end


def run_in_threads(
    calls: Iterable[Callable[[], None]], streams: DeviceStreams, timeout: float = _CLOSE_TIMEOUT
) -> None:
    """Run calls concurrently, each in its own thread, and wait for them until a timeout."""

    def run(call: Callable[[], None]) -> None:
        streams.bind_thread()
        call()

    name = "asyncddp-nccl"
    threads = [threading.Thread(target=run, args=[call], name=name, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def nccl_group(nccl: Any) -> Iterator[None]:
    """Group the NCCL calls inside this context into one launch."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def exchange(nccl: Any, pair_rank: int, parts: Sequence[tuple[bool, torch.Tensor]]) -> NCCLCall:
    """Make the NCCL call for a group of messages; a part is a flag (is a send) and the bytes.

    The n-th send of either rank matches the n-th receive of the other rank.
    """

    def call(handle: Any, stream: int) -> None:
        with nccl_group(nccl):
            for sends, flat in parts:
                one = handle.send if sends else handle.recv
                one(flat.data_ptr(), flat.numel(), BYTE, 1 - pair_rank, stream)

    return call


def open_connected_pair(
    library: CupyBindings, streams: DeviceStreams, unique_id: bytes, pair_rank: int
) -> NCCLCommunicator:
    """Open a communicator of two ranks, and exchange a byte each way, waiting for the peer.

    NCCL connects two ranks in their first exchange, which waits for the peer like opening does.
    """
    made = NCCLCommunicator.open(library, streams, 2, unique_id, pair_rank)
    both = made.allocate(2)
    first = exchange(library.nccl, pair_rank, [(True, both[:1]), (False, both[1:])])
    made.enter("the first exchange", first, [both], [])
    return made


def open_in_thread(
    make: Callable[[], NCCLCommunicator], streams: DeviceStreams
) -> Future[NCCLCommunicator]:
    """Open a communicator in a separate thread, since opening waits for its other ranks."""
    opening: Future[NCCLCommunicator] = Future()

    def run() -> None:
        try:
            streams.bind_thread()
            opening.set_result(make())
        except Exception as problem:  # noqa: BLE001 - whoever waits for the opening raises it
            opening.set_exception(problem)

    threading.Thread(target=run, name="asyncddp-nccl-opening", daemon=True).start()
    return opening


def abort_when_open(opening: Future[NCCLCommunicator]) -> None:
    """Abort an unneeded communicator, now or once it is open."""

    def abort(opened: Future[NCCLCommunicator]) -> None:
        if opened.exception() is None:
            opened.result().abort("nobody waits for it any more")

    opening.add_done_callback(abort)
