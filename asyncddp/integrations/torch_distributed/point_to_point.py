"""Messages between two ranks: ``send``, ``recv`` and ``recv_anysource``, with torch's tags."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from asyncddp.device.stream_interfaces import StreamOrdering, mark_library_thread
from asyncddp.errors import ArgumentError, PeerError, WaitTimeoutError
from asyncddp.integrations.torch_distributed.group_channel import TAG, GroupChannel
from asyncddp.integrations.torch_distributed.work import GroupWork
from asyncddp.transport.base import TRANSFER_ERRORS, Request

_LOOK_AT_CLOCK = 64  # attempts
_PROGRESS_SECONDS = 0.002  # seconds between looks at messages that nobody waits for


def check_message(verb: str, channel: GroupChannel, peer: int | None, tag: int) -> None:
    """Raise an ArgumentError for a rank that is not there, or a tag that MPI cannot carry."""
    if peer is not None and (not 0 <= peer < channel.size or peer == channel.rank):
        raise ArgumentError(
            f"{verb}: expected another rank of the group, from 0 to {channel.size - 1}, got {peer}"
        )
    if not 0 <= tag < TAG:
        raise ArgumentError(f"{verb}: argument tag: expected 0 to {TAG - 1}, got {tag}")


class AnySourceRequest:
    """Request of a receive from whichever rank sends first; ``source`` is that rank."""

    def __init__(self, channel: GroupChannel, out: torch.Tensor, tag: int) -> None:
        self._transport, self._out, self._tag = channel.transport, out, tag
        self._irecv = channel.message_transport_for(out).irecv
        self._request: Request | None = None
        self.source = -1

    def done(self) -> bool:
        """Look for a message, and then test its receive."""
        if self._request is None:
            source = self._transport.probe(self._tag)
            if source is None:
                return False
            self.source = source
            self._request = self._irecv(self._out, source, self._tag)
        return self._request.done()

    def abandon(self) -> None:
        """Give up the receive of a message, if one was found."""
        if self._request is not None:
            self._request.abandon()


class MessageWork(GroupWork):
    """Work of one message, which is under way from the start and tested by those who wait."""

    def __init__(
        self,
        title: str,
        channel: GroupChannel,
        request: Request,
        tensor: torch.Tensor,
        finish: Callable[[], None],
        progress: MessageProgress,
        ordering: StreamOrdering | None,
    ) -> None:
        super().__init__(title, [tensor], ordering=ordering)
        self._channel, self._request, self._finish = channel, request, finish
        self._progress, self._timeout, self._started = progress, channel.timeout, time.monotonic()
        self._testing = threading.Lock()
        if ordering is not None:
            progress.watch(self)  # its copies go on though nobody waits

    def test(self) -> bool:
        """Test the message, and complete the work if it has come; return True if it has ended."""
        with self._testing:
            if self._ended.is_set():
                return True
            try:
                with self._channel.messages_lock:
                    done = self._request.done()
            except TRANSFER_ERRORS as error:
                self._fail(error)
                return True
            if done:
                self.run(self._finish)
            return done

    def _fail(self, error: BaseException) -> None:
        self._channel.failure = self._channel.failure or error
        self.complete(error)

    def expire(self) -> bool:
        """Give the message up if its deadline has passed, or the group has failed."""
        overdue = time.monotonic() - self._started > self._timeout
        with self._testing:
            if self._ended.is_set() or not (overdue or self._channel.failure):
                return self._ended.is_set()
            with self._channel.messages_lock:
                self._request.abandon()
            rank = self._channel.ranks[self._channel.rank]
            title = f"rank {rank}: {self.title}"
            if overdue:
                self._fail(WaitTimeoutError(f"{title} was not done in {self._timeout:g} s"))
            else:
                self._fail(PeerError(f"{title}: the group has failed: {self._channel.failure}"))
        return True

    def _wait_until_ended(self, seconds: float | None) -> bool:
        until = None if seconds is None else time.monotonic() + seconds
        attempt = 0
        while not self.test():
            attempt += 1
            if attempt % _LOOK_AT_CLOCK == 0:
                if self.expire():
                    break
                if until is not None and time.monotonic() > until:
                    return False
            self._channel.transport.backoff(attempt)
        return True

    def has_ended(self) -> bool:
        """Test the message, and return True if it has come or failed."""
        return self.test()

    def get_future(self) -> Future[Any]:
        """Return a future with the tensor, which is completed even if nobody waits."""
        future = super().get_future()
        if not self.test():
            self._progress.watch(self)
        return future

    def source_rank(self) -> int:
        """Return the rank of the group from which the message has come; -1 if not known."""
        return int(getattr(self._request, "source", -1))

    _source_rank = source_rank


class MessageProgress:
    """Thread that tests a group's messages for which somebody has asked the future.

    Others need none: whoever waits for them tests them.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._pending: list[MessageWork] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, work: MessageWork) -> None:
        """Complete a work without anybody waiting for it."""
        with self._changed:
            self._pending.append(work)
            if self._thread is None:
                name = f"asyncddp: messages of {self._title}"
                self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        mark_library_thread()
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                pending = list(self._pending)
            ended = [work for work in pending if work.test() or work.expire()]
            with self._changed:
                self._pending = [work for work in self._pending if work not in ended]
            time.sleep(_PROGRESS_SECONDS)
