"""Request of one send or receive between two ranks by NCCL."""

from __future__ import annotations

from typing import Protocol

import torch

from asyncddp.device.streams import DeviceEvent
from asyncddp.errors import PeerError
from asyncddp.tensors.allocation import empty
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.nccl.match_table import RequestDescriptor

_NOTHING = empty((0,), torch.uint8)


class RequestChannel(Protocol):
    """Interface through which an NCCL request makes progress, or has itself cancelled."""

    def drive(self) -> None:
        """Advance all requests of the transport."""
        ...

    def cancel(self, request: MessageRequest) -> None:
        """Cancel a receive."""
        ...


class MessageRequest:
    """Request of one send or receive between two ranks, carried out by NCCL.

    It waits until the other rank has its counterpart, is launched by both, and ends on the device.

    Args:
        channel: The channel of the two ranks.
        descriptor: Number, direction, tag and size.
        flat: Its bytes, on the device or, for a receive, anywhere.
        ready: Event of the device's work that precedes it.

    Attributes:
        event: Event after it on the device, once it is launched.
        staged: The staged request used instead, where the pair has no communicator.
        problem: Error that has ended it.
        abandoned: Whether nobody waits for it.
    """

    def __init__(
        self,
        channel: RequestChannel,
        descriptor: RequestDescriptor,
        flat: torch.Tensor,
        ready: DeviceEvent,
    ) -> None:
        self._channel, self.descriptor, self.flat, self.ready = channel, descriptor, flat, ready
        self.event: DeviceEvent | None = None
        self.staged: Request | None = None
        self.problem: PeerError | None = None
        self.abandoned = False
        self._finished = False

    @property
    def over(self) -> bool:
        """True if the request has ended, with success or an error."""
        return self.problem is not None or self.finished()

    def finished(self) -> bool:
        """Return whether the device has completed it."""
        if not self._finished and self.event is not None and self.event.done():
            self.finish()
        return self._finished

    def finish(self) -> None:
        """Mark the request as completed, and release its tensor."""
        self._finished, self.flat = True, _NOTHING

    def done(self) -> bool:
        """Advance all requests of the transport; return whether this one is completed."""
        self._channel.drive()
        if self.problem is not None:
            raise self.problem
        return self.finished() if self.staged is None else self.staged.done()

    def abandon(self) -> None:
        """Abandon the request.

        A send goes all the same, since its receiver counts on it. A receive is cancelled unless
        both sides have launched it; then NCCL knows no other way than to abort the communicator.
        """
        again, self.abandoned = self.abandoned, True
        if self.staged is not None:
            self.staged.abandon()
        elif not (again or self.descriptor.sends or self.over):
            self._channel.cancel(self)
