"""Active messages: one-sided messages that run a handler on the receiving rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from asyncddp.engine.announced_tensor_receiver import AnnouncedTensorReceiver
from asyncddp.engine.messages import (
    DECODE_ERRORS,
    ActiveMessage,
    HandlerArguments,
    MatchKey,
    Nack,
)
from asyncddp.engine.persistent_channels import PersistentChannelTable
from asyncddp.engine.send_queue import SendQueue
from asyncddp.errors import AsyncDDPError, PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import as_bytes, from_bytes
from asyncddp.transport.base import SHORT_BYTES, TRANSFER_ERRORS, Request, Transport, has_ended

ActiveMessageHandler: TypeAlias = Callable[[int, tuple[Any, ...], torch.Tensor | None], None]
"""Handler of active messages, called with the sender's rank, the arguments, and the tensor."""

_Received: TypeAlias = tuple[ActiveMessage, torch.Tensor | None, Request | None]


class ActiveMessageDispatcher:
    """Dispatcher of one rank's active messages: sends messages, and runs handlers of received ones.

    The engine's lock guards it. ``handlers`` are keyed by name, and run in whichever thread drives
    the engine. Their errors are raised by the next operation of both ranks. So is the error if
    there is no memory for a tensor; its handler then gets None.
    """

    def __init__(
        self,
        transport: Transport,
        send_queue: SendQueue,
        announced: AnnouncedTensorReceiver,
        channels: PersistentChannelTable,
    ) -> None:
        self._transport, self._queue = transport, send_queue
        self._announced, self._channels = announced, channels
        self.handlers: dict[str, ActiveMessageHandler] = {}
        self._sends: list[tuple[Request, torch.Tensor]] = []
        self._received: dict[int, deque[_Received]] = {}

    @property
    def busy(self) -> bool:
        """True while tensors are in flight."""
        return bool(self._received or self._sends)

    def send(
        self,
        peer: int,
        handler: str,
        arguments: HandlerArguments,
        tensor: torch.Tensor | None = None,
    ) -> None:
        """Send a message that runs a handler on a peer, without waiting.

        The tensor is contiguous, on the host, and unchanged until the peer is known to have it.
        """
        if tensor is None:
            self._queue.put(peer, ActiveMessage(handler, arguments, "", (), None, -1))
            return
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        raw = as_bytes(tensor)
        if raw.numel() <= SHORT_BYTES:
            data = raw.numpy().tobytes()
            self._queue.put(peer, ActiveMessage(handler, arguments, dtype, shape, data, -1))
            return
        tag = self._queue.next_tag()
        self._queue.put(peer, ActiveMessage(handler, arguments, dtype, shape, None, tag))
        self._queue.flush()  # else the announcement would queue behind the bytes
        self._sends.append((self._transport.isend(tensor, peer, tag), tensor))

    def receive(self, peer: int, message: ActiveMessage) -> None:
        """Receive a peer's message, and its tensor if one follows; then run the handler."""
        tensor: torch.Tensor | None = None
        request: Request | None = None
        if message.payload is not None:
            tensor = from_bytes(message.payload, getattr(torch, message.dtype), message.shape)
        elif message.dtype:
            try:
                tensor = empty(message.shape, getattr(torch, message.dtype))
                request = self._transport.irecv(tensor, peer, message.tag)
            except TRANSFER_ERRORS as error:
                self._fail(peer, message, error)
                self._announced.discard(peer, message)
                tensor = None
        self._received.setdefault(peer, deque()).append((message, tensor, request))
        self._deliver(peer)

    def progress(self) -> bool:
        """Run the handlers of complete messages; return whether there were any."""
        if self._sends:
            self._sends = [pair for pair in self._sends if not has_ended(pair[0])]
        return any([self._deliver(peer) for peer in list(self._received)])

    def close(self) -> None:
        """Abandon transfers in progress, and remove all handlers."""
        requests = [request for request, _ in self._sends]
        for waiting in self._received.values():
            requests += [request for _, _, request in waiting if request is not None]
        for request in requests:
            if not has_ended(request):
                request.abandon()
        self._sends.clear()
        self._received.clear()
        self.handlers.clear()

    def _deliver(self, peer: int) -> bool:
        """Run the handlers of one peer's complete messages; return whether there were any."""
        waiting, delivered = self._received[peer], False
        while waiting and (waiting[0][2] is None or self._complete(waiting[0][2], waiting)):
            message, tensor, _ = waiting.popleft()
            delivered = True
            try:
                if message.handler in self.handlers:
                    self.handlers[message.handler](peer, message.arguments, tensor)
            except (AsyncDDPError, *DECODE_ERRORS) as error:
                self._fail(peer, message, error)
        if not waiting:
            del self._received[peer]
        return delivered

    def _fail(self, peer: int, message: ActiveMessage, cause: Exception) -> None:
        """Fail the next operation of this rank and of the message's sender."""
        problem = f"what rank {peer} sent to {message.handler} could not be taken"
        error = PeerError(f"{problem}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._channels.fail_next_call(error)
        key = MatchKey(message.handler, -1)
        self._queue.put(peer, Nack.of(self._transport.rank, key, error))

    def _complete(self, request: Request, waiting: deque[_Received]) -> bool:
        """Return whether a tensor was received; drop all messages of a peer that has failed."""
        try:
            return request.done()
        except PeerError:
            waiting.clear()
            return False
