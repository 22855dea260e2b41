"""Base class of GPU transports, and interfaces of transports that read peers' GPU memory."""

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
    """Make a method that forwards to the same method of the object in an attribute."""
    name = method.__name__

    def forward(self: object, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, attribute), name)(*args, **kwargs)

    return cast("F", update_wrapper(forward, method, updated=()))


class DeviceTransport(Transport):
    """Base class of GPU transports; each subclass declares which ranks can use it.

    A transport of ``Scope.MACHINE`` serves all pairs of ranks that can use it; a transport of
    ``Scope.ANY`` is used only if all pairs of the group can use it. Each uses a transport for host
    tensors.
    """

    serves_collectives: ClassVar[bool] = False
    """True if it runs collectives; otherwise they are staged."""
    first_between_machines: ClassVar[bool] = False
    """True if it is preferred between machines, whatever its position in the user's list."""

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
        """Add the capabilities of this process's libraries that the transport requires."""
        return facts

    @staticmethod
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        """Return why two ranks cannot use the transport between their GPUs; None if they can."""
        return None

    @staticmethod
    def doubt(facts: DeviceCapabilities) -> str:
        """Return a warning about a rank's use of the transport; empty if there is none."""
        return ""

    @classmethod
    def open(
        cls, base: Transport, streams: DeviceStreams, reachable: Collection[int], timeout: float
    ) -> DeviceTransport:
        """Open the transport between all ranks of a host transport; collective.

        ``reachable`` are the other ranks that exchange messages by it; ``timeout`` is the number of
        seconds for the ranks to connect. A rank that raises an error has taken part in all
        collectives of ``base`` before; other ranks that need it raise after ``timeout``.
        """
        return cls(base, streams)

    def for_subgroup(self, base: Transport, timeout: float) -> DeviceTransport | None:
        """Open the same transport for a subgroup; collective; None if that is not supported."""
        return None

    def free(self) -> None:
        """Free the resources of a transport that is not used; ``base`` stays open."""

    def for_device(self, streams: DeviceStreams) -> DeviceTransport:
        """Return this transport for its own device; raise an ArgumentError for another device.

        Tensors on the host, which only receive discarded messages, are supported as well.
        """
        if streams.device in (self.streams.device, torch.device("cpu")):
            return self
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, for which {self.name} "
            f"was opened, got one on {streams.device}; use that GPU, whose number is this rank's "
            "on its host modulo the visible ones, or set ASYNCDDP_DEVICE_TRANSPORTS=cuda_staged"
        )


class DirectReadSendRequest(Request, Protocol):
    """Request of a send that the peer reads in place; complete once its reads are enqueued."""

    def reusable(self) -> bool:
        """Return whether the tensor may be overwritten, even if the peer has not read it yet."""
        ...


class DirectReadReceiveRequest(Request, Protocol):
    """Request to read a peer's tensor in place; complete once the compute stream may read it."""

    @property
    def tensor(self) -> torch.Tensor:
        """The peer's tensor, available from completion to :meth:`release`; read-only."""
        ...

    def release(self) -> None:
        """Notify the peer that all reads are enqueued on COMPUTE; a second call does nothing.

        A call before completion means that the tensor will not be read: the peer's export is
        released as soon as it arrives.
        """
        ...


class DirectReadTransport(ABC):
    """Interface of a transport whose peers read copies of tensors in a rank's GPU memory.

    A request is complete with respect to all work enqueued on the COMPUTE stream afterwards: the
    host never waits for the device. Tensors sent by :meth:`export_tensor` or ``isend`` are received
    by ``irecv`` or :meth:`import_tensor`.
    """

    @abstractmethod
    def export_tensor(
        self, data: torch.Tensor, tags: Mapping[int, int], factor: float = 1.0
    ) -> Mapping[int, DirectReadSendRequest]:
        """Export a copy of a tensor, times a factor, to peers, each under its own tag."""

    @abstractmethod
    def import_tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> DirectReadReceiveRequest:
        """Start to import a peer's tensor, to be read in place."""
