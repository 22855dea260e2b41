"""Short messages: each carries a whole small tensor, and is sent without a queued operation.

Once a receiver has acknowledged the signature, the caller's thread posts such messages, and a
receive is an entry of the matcher, completed by whichever thread makes progress. An operation is
submitted if more is needed: an acknowledgement, a mismatch, or a caller who has to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from asyncddp.engine.exchange_request import ShortMessage
from asyncddp.engine.handle import Handle
from asyncddp.engine.messages import MatchKey, TensorMessage
from asyncddp.engine.pairwise_averaging import poll_briefly
from asyncddp.engine.progress_loop import ProgressLoop
from asyncddp.engine.work import OperationSpec
from asyncddp.tensors.byte_views import from_bytes, to_bytes, write_bytes
from asyncddp.torch_modes import uncompiled


class ShortMessageHandle(Handle[Any]):
    """Handle of a short message's send or receive; it submits an operation only if needed.

    ``submit`` submits an operation that takes over.
    """

    _ended = False
    _value: torch.Tensor | None = None
    _operation: Handle[Any] | None = None

    def __init__(
        self,
        loop: ProgressLoop,
        spec: OperationSpec[Any],
        message: ShortMessage,
        key: MatchKey,
        submit: Callable[[], Handle[Any]],
    ) -> None:
        self._loop, self._spec, self._message = loop, spec, message
        self._key, self._submit = key, submit

    def begin(self) -> None:
        """Post or expect the message; submit an operation if the engine is locked or that fails."""
        lock, message, matcher = self._loop.lock, self._message, self._loop.matcher
        if not lock.acquire(blocking=False):
            self._operation = self._submit()
            return
        try:
            if message.receives:
                matcher.expect(self._key, self)
            elif message.tensor is None or not matcher.post_short(
                self._key, message.signature, message.peer, to_bytes(message.tensor)
            ):
                self._operation = self._submit()
            else:
                self._end(None)
        finally:
            lock.release()

    def receive(self, peer: int, message: TensorMessage) -> bool:
        """Receive the message if it is as expected; else submit an operation and return False."""
        mine, payload = self._message, message.payload
        if (
            peer != mine.peer
            or payload is None
            or message.wants_ack
            or message.mutual
            or message.tag < 0
            or mine.signature.difference(message) is not None
        ):
            self.hand_over()
            return False
        value = mine.tensor
        if value is None:
            value = from_bytes(payload, getattr(torch, message.dtype), tuple(message.shape))
        else:
            write_bytes(value, payload)
        self._end(value)
        return True

    def _end(self, value: torch.Tensor | None) -> None:
        self._value, self._ended = value, True
        if self._spec.on_end is not None:
            self._spec.on_end(None)

    def hand_over(self) -> None:
        """Submit an operation, with deadlines and checks, unless the call has ended."""
        with self._loop.lock:
            if self._is_pending():
                self._loop.matcher.expected.pop(self._key, None)
                self._operation = self._submit()

    def _is_pending(self) -> bool:
        return not self._ended and self._operation is None

    @override
    @uncompiled
    def poll(self) -> bool:
        if self._is_pending():
            self._loop.progress()
        return self._ended if self._operation is None else self._operation.poll()

    @override
    @uncompiled
    def wait(self, timeout: float | None = None) -> Any:
        if self._is_pending():
            poll_briefly(self._has_moved, self._loop.pause)
            self.hand_over()
        return self._value if self._operation is None else self._operation.wait(timeout)

    def _has_moved(self) -> bool:
        """Make progress; return whether polling can stop."""
        self._loop.progress()
        return not self._is_pending()

    @override
    def fail(self, error: BaseException) -> None:
        self.hand_over()
        if self._operation is not None:
            self._operation.fail(error)

    @override
    def __repr__(self) -> str:
        if self._operation is not None:
            return repr(self._operation)
        return f"<Handle {self._spec.verb} {self._key} {'done' if self._ended else 'under way'}>"
