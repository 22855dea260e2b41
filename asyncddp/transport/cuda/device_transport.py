"""Base classes of GPU transports, with one for transports that read peers' GPU memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import update_wrapper
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch

from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.errors import ArgumentError
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities

F = TypeVar("F", bound=Callable[..., Any])


def forward_to(attribute: str, method: F) -> F:
    """Make a method that calls the method of the same name on a transport in an attribute."""
    name = method.__name__

    def forward(self: object, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, attribute), name)(*args, **kwargs)

    return cast("F", update_wrapper(forward, method, updated=()))


class DeviceTransport(Transport):
    """Base class of GPU tensor transports; each subclass declares which ranks can use it.

    One of ``Scope.MACHINE`` serves those pairs of ranks that it can; one of ``Scope.ANY`` is used
    where it can serve every two ranks of the group. Each uses a transport for host tensors.
    """

    serves_collectives: ClassVar[bool] = False
    """True if collectives go by it where it is used; else they are staged."""
    first_between_machines: ClassVar[bool] = False
    """True if it precedes all others between machines, whatever its place in the user's list."""

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        self.base, self.streams = base, streams
        self.rank, self.size, self.allows_threads = base.rank, base.size, base.allows_threads

    post = forward_to("base", Transport.post)
    poll = forward_to("base", Transport.poll)
    machine_id = forward_to("base", Transport.machine_id)
    split = forward_to("base", Transport.split)
    backoff = forward_to("base", Transport.backoff)
    abort = forward_to("base", Transport.abort)
    close = forward_to("base", Transport.close)

    # where it can be used

    @staticmethod
    def detect(facts: DeviceCapabilities) -> DeviceCapabilities:
        """Add what the transport must know about this process's libraries."""
        return facts

    @staticmethod
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        """Return why two ranks cannot use the transport between their GPUs; None if they can."""
        return None

    @staticmethod
    def doubt(facts: DeviceCapabilities) -> str:
        """Return a warning about a rank's use of the transport; empty where there is none."""
        return ""

    @classmethod
    def open(
        cls, base: Transport, streams: DeviceStreams, reachable: Collection[int], timeout: float
    ) -> DeviceTransport:
        """Open the transport between all ranks of a host transport, or raise; collective.

        ``reachable`` are the other ranks whose messages go by it; ``timeout`` has the
        seconds for the ranks to find each other. A rank that raises has taken part in all of the
        collectives of ``base`` before, and the others raise after ``timeout`` if they need it.
        """
        return cls(base, streams)

    def for_subgroup(self, base: Transport, timeout: float) -> DeviceTransport | None:
        """Open the same transport for the ranks of a subgroup; collective; None if it cannot."""
        return None

    def free(self) -> None:
        """Free the transport's resources if it is not used after all; ``base`` stays open."""

    def for_device(self, streams: DeviceStreams) -> DeviceTransport:
        """Return this transport for its device; raise an ArgumentError for another one.

        Tensors on the host, which only receive dropped messages, are served as well.
        """
        if streams.device in (self.streams.device, torch.device("cpu")):
            return self
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, for which {self.name} "
            f"was opened, got one on {streams.device}; use that GPU, whose number is this rank's "
            "on its host modulo the visible ones, or set ASYNCDDP_DEVICE_TRANSPORTS=cuda_staged"
        )


class DirectReadSendRequest(Request, Protocol):
    """Request of a send to a peer that reads it in place; complete once its reads are queued."""

    def reusable(self) -> bool:
        """Return True once the tensor may be overwritten; the peer may not have read it yet."""
        ...


class DirectReadReceiveRequest(Request, Protocol):
    """Request to read a peer's tensor in place; complete once the compute stream may read it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The peer's tensor, once complete; to be read before :meth:`release`, never written."""
        ...

    def release(self) -> None:
        """Tell the peer that all reads are queued on COMPUTE; harmless when called twice.

        Called before completion it means that the tensor will not be read: the peer's export is
        released as soon as it arrives.
        """
        ...


class DirectReadTransport(ABC):
    """Interface of a transport by which peers read copies of tensors in a rank's GPU memory.

    A completed request holds for all work that is queued on the COMPUTE stream from then on: the
    host never waits for the device. Both ``irecv`` and :meth:`import_tensor` receive what
    :meth:`export_tensor` or ``isend`` sends.
    """

    @abstractmethod
    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float = 1.0
    ) -> Mapping[int, DirectReadSendRequest]:
        """Export a copy of a tensor, or its product with a factor, to peers, each under a tag."""

    @abstractmethod
    def import_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> DirectReadReceiveRequest:
        """Start importing a peer's tensor."""
