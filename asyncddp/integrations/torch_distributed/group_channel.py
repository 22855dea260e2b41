"""The transport of one group with its deadlines: waits that end, and tell who is missing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch._C._distributed_c10d import Store

from asyncddp.device.stream_registry import streams_of
from asyncddp.errors import PeerError, WaitTimeoutError
from asyncddp.integrations.torch_distributed.store_meeting import WaitAnnouncements
from asyncddp.transport import Transport
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.negotiation import close_device_transports
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport, device_transport_for

_LOOK_AT_CLOCK = 64  # attempts
TAG = 32767
"""Tag of messages within collectives; those of ``send`` have lower ones."""


@dataclass
class RunningCollective:
    """The collective that a group runs: its number in the group, verb and deadline."""

    number: int
    verb: str
    timeout: float
    started: float
    announced: bool = False


class WholeMessageTransport(CudaStagedTransport):
    """Staged transport of messages in one piece, as tensors on the host travel."""

    max_piece = sys.maxsize


class GroupChannel:
    """One group's transport, in which one collective runs at a time.

    Attributes:
        transport: Between the ranks of the group.
        ranks: Their numbers in the world.
        timeout: Seconds after which a wait raises, unless the verb has its own.
        title: The group's name in messages.
        failure: The error after which no verb of the group can run; None while all is well.
        messages_lock: Held in calls of the transports that start or test requests.
        is_patient: Tells whether what runs is beside a computation, and should poll less often.
    """

    def __init__(
        self, transport: Transport, store: Store, ranks: Sequence[int], timeout: float, title: str
    ) -> None:
        self.transport, self.ranks, self.timeout, self.title = transport, ranks, timeout, title
        self.rank, self.size = transport.rank, transport.size
        self.failure: BaseException | None = None
        self.messages_lock = threading.Lock()
        self.is_patient: Callable[[], bool] = _never
        self._announcements = WaitAnnouncements(store, ranks, transport.rank)
        self._count = 0
        self._running = RunningCollective(0, "", timeout, 0.0)
        self._staged = cache(partial(WholeMessageTransport, transport))

    def require_working(self, verb: str) -> None:
        """Raise a PeerError if an earlier verb of the group has failed."""
        if self.failure is not None:
            raise PeerError(
                f"rank {self.ranks[self.rank]}: {verb}: {self.title} cannot go on after "
                f"{type(self.failure).__name__}: {self.failure}"
            ) from self.failure

    @contextmanager
    def collective(self, verb: str, timeout: float | None) -> Iterator[None]:
        """Run one collective inside, with its number in the group and its deadline."""
        self.require_working(verb)
        self._count += 1
        seconds = self.timeout if timeout is None else timeout
        self._running = RunningCollective(self._count, verb, seconds, time.monotonic())
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    def transport_for(self, tensor: torch.Tensor) -> Transport:
        """Return the transport of collectives on a tensor: that of its device."""
        streams = streams_of(tensor)
        return self.transport if streams is None else device_transport_for(self.transport, streams)

    def message_transport_for(self, tensor: torch.Tensor) -> Transport:
        """Return the transport of ``send`` and ``recv``: for a tensor on a device, a staged one.

        A receive from any rank looks for messages on the host, and finds each once.
        """
        streams = streams_of(tensor)
        return self.transport if streams is None else self._staged(streams)

    def run(self, tensor: torch.Tensor, start: Callable[[Transport], Request]) -> None:
        """Start a request on a tensor, by the transport of its device, and :meth:`finish` it."""
        with self.messages_lock:
            request = start(self.transport_for(tensor))
        self.finish([request])

    def finish(self, requests: Sequence[Request]) -> None:
        """Wait for requests of the running collective, which are tested by one thread at a time.

        Raises:
            WaitTimeoutError: Its deadline has passed; the message tells which ranks are missing.
            PeerError: The transport or another verb of the group has failed.
        """
        backoff, attempt = self.transport.backoff, 0
        for request in requests:
            while not self._is_done(request):
                attempt += 1
                if attempt % _LOOK_AT_CLOCK == 0:
                    self._check(requests)
                backoff(attempt, background=self.is_patient())

    def _is_done(self, request: Request) -> bool:
        with self.messages_lock:
            return request.done()

    def close(self) -> None:
        """Close the transports."""
        close_device_transports(self.transport)
        self.transport.close()

    def _check(self, requests: Sequence[Request]) -> None:
        running = self._running
        waited = time.monotonic() - running.started
        delay = self._announcements.delay(running.timeout)
        if not running.announced and waited > delay:
            running.announced = True
            self._announcements.announce(running.number, running.verb)
        with self.messages_lock:
            for watch in self.transport.device_watches or ():
                watch(running.timeout)
        if self.failure is None and waited <= running.timeout + delay:
            return
        with self.messages_lock:
            for request in requests:
                request.abandon()
        self.require_working(running.verb)
        raise WaitTimeoutError(
            f"rank {self.ranks[self.rank]}: {running.verb} (collective {running.number} of "
            f"{self.title}) was not done in {running.timeout:g} s; "
            f"{self._announcements.explain(running.number, running.verb)}"
        )


def _never() -> bool:
    return False
