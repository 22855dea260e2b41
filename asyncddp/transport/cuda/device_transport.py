"""Abstract base class of GPU transports: when each can be used, how it is opened and verified."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import make_tensor, zeros_like
from asyncddp.transport.base import Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities

_TRIAL_BYTES = 1 << 16


class DeviceTransport(Transport):
    """Base class of transports for tensors on a rank's GPU, which declares where it can be used.

    One of ``Scope.MACHINE`` serves those pairs of ranks that it can; one of ``Scope.ANY`` is used
    where it can serve every two ranks of the group. Each stands on a transport for tensors on the
    host, between the same ranks.
    """

    serves_collectives: ClassVar[bool] = False
    """True if collectives go by it where it is used; else they are staged."""
    first_between_machines: ClassVar[bool] = False
    """True if it precedes all others between machines, whatever its place in the user's list."""

    def __init__(self, base: Transport, streams: DeviceStreams) -> None:
        self.base, self.streams = base, streams
        self.rank, self.size, self.allows_threads = base.rank, base.size, base.allows_threads

    # messages and ranks: those of the host transport

    @override
    def post(self, peer: int, message: bytes) -> None:
        self.base.post(peer, message)

    @override
    def poll(self) -> Iterable[tuple[int, bytes]]:
        return self.base.poll()

    @override
    def machine_id(self) -> int:
        return self.base.machine_id()

    @override
    def backoff(self, attempt: int, *, background: bool = False) -> None:
        self.base.backoff(attempt, background=background)

    @override
    def abort(self, code: int) -> None:
        self.base.abort(code)

    @override
    def close(self) -> None:
        self.base.close()

    # where it can be used

    @staticmethod
    def detect(facts: DeviceCapabilities) -> DeviceCapabilities:
        """Add what the transport needs to know of this process's libraries."""
        return facts

    @staticmethod
    def obstacle(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
        """Return why it cannot be used between the GPUs of two ranks; None where it can."""
        del one, other
        return None

    @staticmethod
    def doubt(facts: DeviceCapabilities) -> str:
        """Return a warning about the use of it by a rank; empty where there is none."""
        del facts
        return ""

    @classmethod
    def open(
        cls,
        base: Transport,
        streams: DeviceStreams,
        reachable: Collection[int] = (),
        timeout: float = 60.0,
    ) -> DeviceTransport:
        """Open it between all ranks of ``base``; collective.

        Args:
            base: The transport for tensors on the host.
            streams: Streams of the device.
            reachable: The other ranks to which there is no :meth:`obstacle`.
            timeout: Seconds for the ranks to find each other.

        Raises:
            EnvironmentProblem: It cannot be opened.
        """
        del reachable, timeout
        return cls(base, streams)

    def for_subgroup(self, base: Transport) -> DeviceTransport | None:
        """Open it between the ranks of a host transport; collective; None where it cannot."""
        del base
        return None

    def free(self) -> None:
        """Free its resources, where it is not used after all; ``base`` stays open."""

    def verify(self, timeout: float, *, messages: bool = True) -> bool:
        """Verify that it moves and sums data rightly, before it is used; collective.

        A pattern goes around the ring and a sum is formed; without ``messages`` the sum alone.
        """
        streams = self.streams

        def made(rank: int) -> torch.Tensor:
            pattern = make_tensor(range(_TRIAL_BYTES), torch.int64, streams.device)
            return pattern.mul_(2 * rank + 1).to(torch.uint8)

        ahead, behind = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with streams.stream_context(StreamRole.COMPUTE):
            data, expected = made(self.rank), made(behind)
            out = zeros_like(expected) if messages else expected
            total = data.to(torch.float32)
        try:
            if messages:
                arriving, sending = self.irecv(out, behind, 0), self.isend(data, ahead, 0)
                self.finish(arriving, timeout, "trial")
                self.finish(sending, timeout, "trial")
            self.finish(self.iallreduce(total), timeout, "trial")
        except RuntimeError:  # a peer's error, or that of a library
            return False
        with streams.stream_context(StreamRole.COMPUTE):
            exact = torch.stack([made(rank).to(torch.float32) for rank in range(self.size)]).sum(0)
            return bool(torch.equal(out, expected) and torch.equal(total, exact))

    def for_device(self, streams: DeviceStreams) -> DeviceTransport:
        """Return the transport for a device of this rank: this one, if it serves the device.

        Tensors on the host, which only receive dropped messages, are served as well.

        Raises:
            ArgumentError: It serves another device of this rank.
        """
        if streams.device in (self.streams.device, torch.device("cpu")):
            return self
        raise ArgumentError(
            f"rank {self.rank}: expected tensors on {self.streams.device}, for which {self.name} "
            f"was opened, got one on {streams.device}; use the GPU of that number, local_rank() "
            "modulo the visible ones, or leave ASYNCDDP_DEVICE_WIRES unset"
        )
