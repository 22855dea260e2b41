"""Tensor exchanges with peers over a torch.distributed process group, by isend and irecv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.engine import ExchangeSignature, Steps
from asyncddp.engine.exchange_request import (
    ExchangeRequest,
    PendingReceive,
    SendCompletionCondition,
)
from asyncddp.engine.messages import MatchKey
from asyncddp.engine.work import WaitCondition
from asyncddp.errors import PeerError, PeerLeftError, WaitTimeoutError
from asyncddp.tensors.allocation import empty

R = TypeVar("R")
_FIRST_TAG, _TAGS = 24_000, 8_000  # below 2¹⁵, which every MPI library allows
_PHASES = 4  # exchanges of one bucket, at most


class WorkRequest:
    """Request of several torch.distributed ``Work`` objects, done only after :meth:`wait`.

    A work of gloo cannot be tested for completion without waiting for it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._works: Sequence[Any] | None = None  # None before they have begun

    def begin(self, works: Sequence[Any]) -> None:
        """Store the works that have been started for this request."""
        self._works = works

    def wait(self) -> None:
        """Wait for the works; for device tensors, let the current stream wait.

        Raises:
            WaitTimeoutError: The peer did not answer by the process group's timeout.
            PeerLeftError: The peer has closed the connection.
            PeerError: The transfer failed otherwise.
        """
        for work in self._works or ():
            try:
                work.wait()
            except RuntimeError as error:
                raise _peer_error(self._what, error) from error
        self._works = ()

    def done(self) -> bool:
        """Return True if :meth:`wait` has returned."""
        return self._works is not None and not self._works

    def abandon(self) -> None:
        """Drop the works without waiting for them."""
        self._works = ()


def _peer_error(what: str, error: RuntimeError) -> PeerError:
    """Translate a torch error in a transfer into a PeerError."""
    text = str(error)
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return WaitTimeoutError(
            f"{what} did not end by the timeout of the process group: {text}. See whether that "
            "rank still trains, and has registered the same hook with the same graph"
        )
    if "closed" in lowered or "reset" in lowered or "broken pipe" in lowered:
        return PeerLeftError(
            f"{what} failed, as that rank has ended or closed the connection: {text}. Look for the "
            "first error in its output"
        )
    return PeerError(f"{what} failed: {text}")


class ProcessGroupExchanges:
    """Exchanges of one DDP bucket with peers, over a process group of torch.distributed.

    Args:
        group: The process group.
        device: Device of received tensors.
        verb: Name of the hook, for messages.
        index: Number of the bucket; each bucket has its own message tags.
        step: Number of earlier exchanges of the bucket.

    Attributes:
        rank: This rank in the group; peers are ranks of the group as well.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, verb: str, index: int, step: int
    ) -> None:
        self.verb, self.key = verb, MatchKey(f"bucket {index}", step)
        self.rank = dist.get_rank(group)
        self._group, self._device = group, device
        self._tag = _FIRST_TAG + index * _PHASES % _TAGS - 1
        self._queued: list[tuple[dist.P2POp, WorkRequest, int]] = []

    def exchange(
        self,
        signature: ExchangeSignature,
        sources: Iterable[int],
        targets: Iterable[int],
        streams: DeviceStreams | None = None,
        *,
        into: Mapping[int, torch.Tensor] | None = None,
    ) -> ExchangeRequest:
        """Open an exchange; :meth:`begin` starts its sends and receives together."""
        self._tag += 1
        request = ExchangeRequest(self.key, signature, sources, targets, into=into)
        request.streams = streams
        shape = [size for size in signature.shape if size is not None]
        for peer, receive in request.receives.items():
            receive.tensor = request.into.get(peer)
            if receive.tensor is None:
                receive.tensor = empty(shape, getattr(torch, signature.dtype), self._device)
            receive.request = self._queue(dist.irecv, receive.tensor, peer, "receiving from")
        return request

    def send(self, exchange: ExchangeRequest, peer: int, tensor: torch.Tensor) -> None:
        """Queue a contiguous tensor to be sent to a target of the exchange opened last."""
        exchange.sends.append((peer, self._queue(dist.isend, tensor, peer, "sending to")))

    @property
    def _where(self) -> str:
        return f"{self.verb}, {self.key.name} on rank {self.rank}"

    def _queue(
        self, verb: Callable[..., Any], tensor: torch.Tensor, peer: int, doing: str
    ) -> WorkRequest:
        there = dist.get_global_rank(self._group, peer)
        operation = dist.P2POp(verb, tensor, there, self._group, self._tag)
        request = WorkRequest(f"{self._where}: {doing} {peer}")
        self._queued.append((operation, request, peer))
        return request

    def begin(self) -> bool:
        """Start all queued sends and receives as one batch; return False if there are none."""
        if not self._queued:
            return False
        # backends that begin one after the other had better send before they wait to receive
        self._queued.sort(key=lambda queued: queued[0].op is not dist.isend)
        operations, requests, peers = zip(*self._queued, strict=True)
        self._queued = []
        try:
            works = dist.batch_isend_irecv(list(operations))
        except RuntimeError as error:  # a connection that has broken before
            there = ", ".join(map(str, sorted({*peers})))
            raise _peer_error(f"{self._where}: exchanging with {there}", error) from error
        for place, request in enumerate(requests):  # a batch that was coalesced is one work
            alone = len(works) == len(requests)
            request.begin([works[place]] if alone else works)
        return True


class PendingBucketExchange(Generic[R]):
    """Pending exchange of one bucket, in steps that each wait for a batch of messages.

    Args:
        operation: Exchanges that the steps use.
        steps: Operation steps of the exchange.
        finish: Function that is called with the result of the steps.
    """

    def __init__(
        self, operation: ProcessGroupExchanges, steps: Steps[R], finish: Callable[[R], None]
    ) -> None:
        self._operation, self._steps, self._finish = operation, steps, finish
        self._waiting: WaitCondition | None = None

    def advance(self) -> bool:
        """Wait for the messages in flight, and start the next ones; return True when done."""
        while True:
            if self._waiting is not None:
                _wait(self._waiting)
            try:
                self._waiting = next(self._steps)
            except StopIteration as stop:
                self._operation.begin()
                self._finish(stop.value)
                return True
            if self._operation.begin():
                return False


def _wait(condition: WaitCondition) -> None:
    """Wait for the requests that a wait condition refers to."""
    if isinstance(condition, PendingReceive):
        requests: list[Any] = [condition.request]
    elif isinstance(condition, SendCompletionCondition):
        requests = [request for _, request in condition.exchange.sends]
    else:
        raise TypeError(f"expected a condition of an exchange of tensors, got {condition!r}")
    for request in requests:
        request.wait()
