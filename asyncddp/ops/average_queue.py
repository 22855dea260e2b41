"""Queue of non-blocking averages, which are sent and completed in batches.

A single call sends its tensor at once, and the average is computed when it is waited for. Of
several calls the later ones are only queued: their tensors are sent together when one of them is
waited for, when this rank does anything else, or by the progress thread a moment later. Calls whose
neighbours' tensors have arrived are averaged together. Many small tensors therefore cost only a few
operations of torch. Each call is matched by its own name, however either side batches its calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import islice

import torch
from typing_extensions import override

from asyncddp.engine import DeferredCalls, Handle, ProgressEngine
from asyncddp.engine.persistent_channels import PersistentChannel
from asyncddp.errors import AsyncDDPError, NotInitializedError
from asyncddp.ops.deferred_average import AverageBatch, DeferredAverageHandle
from asyncddp.ops.validation import is_same_memory
from asyncddp.torch_modes import normal_mode


class AverageQueue(DeferredCalls):
    """Queue of one rank's non-blocking averages: sends and completes several of them together."""

    def __init__(self, engine: ProgressEngine) -> None:
        self._engine, self._lock = engine, threading.RLock()
        self.unsent: list[DeferredAverageHandle] = []
        self.names: set[str] = set()
        self._batches: list[AverageBatch] = []

    @staticmethod
    def of(engine: ProgressEngine) -> AverageQueue:
        """Return the queue of an engine; create it on first use."""
        if not isinstance(engine.deferred, AverageQueue):
            engine.deferred = AverageQueue(engine)
        return engine.deferred

    def add(self, call: DeferredAverageHandle) -> None:
        """Send the tensor of a call; queue it if other calls are pending or it is large."""
        path, thread = call.path, self._engine.thread
        with self._lock:
            if path.name in self.names:
                self.send()
            first = not self.unsent
            if (
                thread is None
                or not path.fuses
                or path.channel.in_flight
                or (first and not self._batches and not path.is_large)
                or torch.is_inference_mode_enabled()
            ):
                self.send()
                self._send([call])
                return
            self.unsent.append(call)
            self.names.add(path.name)
            if first:
                thread.wake()

    # sending

    @override
    def send(self) -> None:
        with self._lock:
            if not self.unsent:
                return
            calls, self.unsent = self.unsent, []
            self.names.clear()
            self._send(calls)

    def _send(self, calls: list[DeferredAverageHandle]) -> None:
        """Send the tensors of calls; submit a call to the engine if it cannot be sent here."""
        try:
            self._begin(calls)
        finally:
            for call in calls:
                if call.step < 0 and call.found is None and call.error is None:
                    self._submit(call)

    def _begin(self, calls: list[DeferredAverageHandle]) -> None:
        """Count and send the calls that can bypass the engine; hand large tensors to the engine."""
        engine = self._engine
        free = [] if engine.closed else [call for call in calls if call.path.can_send(call.row)]
        steps = engine.count_uses([call.path.use for call in free])
        batch = AverageBatch()
        begun = batch.calls
        for call, step in zip(free, steps, strict=True):
            if step is not None:
                call.step, call.batch, call.place = step, batch, len(begun)
                call.path.channel.deferred.append(call)
                begun.append(call)
        if not begun:
            return
        batch.open = len(begun)
        self._batches.append(batch)
        small = [call for call in begun if not call.path.is_large]
        if small:
            _publish(small)
        if len(small) < len(begun):
            for call in [one for one in begun if one.path.is_large]:
                self._hand_over(call)

    def _submit(self, call: DeferredAverageHandle) -> None:
        """Submit a call to the engine, after the earlier calls under its name."""
        self.hand_over(call.path.channel)
        try:
            call.found = call.path.submit(call.row, call.own, call.into)
        except AsyncDDPError as error:
            call.error = error

    def hand_over(self, channel: PersistentChannel) -> None:
        """Let the engine complete a channel's deferred averages before its other operations."""
        with self._lock:
            for call in list(channel.deferred):
                self._hand_over(call)

    # completing

    def complete(self, call: DeferredAverageHandle) -> torch.Tensor | Handle[torch.Tensor]:
        """Complete a call, if possible together with others, or submit the rest to the engine."""
        with self._lock:
            if self.unsent:
                self.send()
            deferred = call.path.channel.deferred
            while not call.has_ended and deferred and deferred[0] is not call:
                self.complete(deferred[0])
            if not call.has_ended and not self._average_from(call):
                call.found = call.path.finish(call.average)
                self._forget(call)
            if call.found is None:
                raise call.error or RuntimeError("an average has neither a result nor an error")
            return call.found

    def _average_from(self, first: DeferredAverageHandle) -> bool:
        """Average a call with similar later ones of its batch; return False if impossible."""
        row, calls = first.row, first.batch.calls
        if not row.is_pairwise or len(calls) == 1:
            return False
        weight, fresh = row.lerp_weight, first.into is None
        rings, own, others = [], [], []
        for call in islice(calls, first.place, None):
            its, channel = call.row, call.path.channel
            if call.found is not None or (call.into is None) is not fresh or not call.sent_chunks:
                break
            if its is not row and not (its.is_pairwise and its.lerp_weight == weight):
                break
            ring = channel.receive_rings[its.sources[0]]
            other = ring.read_whole(call.step)
            if other is None or channel.in_flight[0] != call.step:
                break
            rings.append(ring)
            own.append(call.own)
            others.append(other)
        ended = calls[first.place : first.place + len(rings)]
        for call, ring, result in zip(ended, rings, _lerp(own, others, ended), strict=True):
            row, channel = call.row, call.path.channel
            ring.acknowledge(call.step, 1)
            channel.record(call.step, row.sources, row.targets)
            channel.in_flight.popleft()
            call.found = result
            self._forget(call)
        return bool(ended)

    @override
    def hand_to_engine(self, age: float) -> None:
        if not (self.unsent or self._batches) or not self._lock.acquire(blocking=False):
            return
        try:
            self.send()
            oldest = time.monotonic() - age
            for batch in [one for one in self._batches if one.since <= oldest]:
                for call in batch.calls:
                    if not call.has_ended and not self._average_from(call):
                        self._hand_over(call)
        finally:
            self._lock.release()

    def _hand_over(self, call: DeferredAverageHandle) -> None:
        call.found = call.path.hand_to_engine(call.average)
        self._forget(call)

    def _forget(self, call: DeferredAverageHandle) -> None:
        deferred, batch = call.path.channel.deferred, call.batch
        deferred.remove(call)
        del call.batch  # they know each other: without this, memory waits for the gc
        batch.open -= 1
        if not batch.open:
            self._batches.remove(batch)

    @override
    def end_after_fork(self, why: str) -> None:
        self._lock = threading.RLock()  # another thread may have held it at the fork
        for call in (*self.unsent, *(call for batch in self._batches for call in batch.calls)):
            if not call.has_ended:
                call.error = NotInitializedError(f"{call!r}: {why}")
                call.path.channel.deferred.clear()
        self.unsent, self._batches = [], []
        self.names.clear()


def _publish(calls: Sequence[DeferredAverageHandle]) -> None:
    """Copy the tensors of calls into slots of their ring buffers, and publish the slots."""
    if len(calls) == 1:
        call, ring = calls[0], calls[0].path.channel.send_ring
        sent = ring is None or ring.try_send(call.step, call.row.targets, call.own)
        call.sent_chunks = int(sent)
        return
    rings, slots, own = [], [], []
    for call in calls:
        ring = call.path.channel.send_ring
        if ring is not None:
            rings.append((ring, call.step))
            slots.append(ring.open_slot(call.step, call.row.targets))
            own.append(call.own)
    if slots:
        torch._foreach_copy_(slots, own)
    for ring, step in reversed(rings):  # so that who finds the first of them finds all
        ring.publish_whole(step)
    for call in calls:
        call.sent_chunks = 1


def _lerp(
    own: list[torch.Tensor], others: list[torch.Tensor], calls: Sequence[DeferredAverageHandle]
) -> Sequence[torch.Tensor]:
    """Average each call's tensor with its neighbour's, in few operations, into given outputs."""
    if not calls:
        return ()
    weight: float = calls[0].row.lerp_weight  # type: ignore[assignment]  # a number: it is pairwise
    into = [call.into for call in calls if call.into is not None]
    with normal_mode():
        if not into:
            return torch._foreach_lerp(own, others, weight)
        if all([is_same_memory(a, b) for a, b in zip(own, into, strict=True)]):
            torch._foreach_lerp_(into, others, weight)
        else:
            for one, other, out in zip(own, others, into, strict=True):
                torch.lerp(one, other, weight, out=out)
        return into
