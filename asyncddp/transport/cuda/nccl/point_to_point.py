"""Point-to-point messages by NCCL: a communicator for every two ranks, opened on first use.

NCCL's sends and receives match by order, and ours by peer and tag in any order. So the two
ranks of a pair agree by messages what both launch next: see
:mod:`~asyncddp.transport.cuda.nccl.coordination_messages`.
What is ready on both sides is launched as one group, in both directions.

**Why ranks cannot deadlock.** A kernel of NCCL occupies its GPU until its peer
has joined it, and NCCL warns of several communicators at once: a kernel that finds no room on a
GPU could hold up the very rank that others wait for. Here

- the host never waits: opening a communicator and its first exchange, in which NCCL connects the
  two ranks, are made on a thread of their own, and each rank launches a group as soon as it
  hears of it, whatever else is under way;
- every pair has a stream to itself, so that no group waits behind another pair's;
- the kernels of all pairs fit on the GPU at once, whatever else comes: messages take at most
  ``NCCL_MAX_P2P_NCHANNELS`` channels (8 unless set), a channel takes one multiprocessor, and a
  rank opens no more communicators than fill half of them. What goes to further peers is staged.

What remains: a call of CUDA inside NCCL's opening may wait for the device; and with
``NCCL_LAUNCH_ORDER_IMPLICIT=1`` NCCL itself puts communicators in the order of each rank's host.
Then messages pass their deadline, and say so.

References:
    NCCL's documentation, "Point-to-point communication" and "Using multiple NCCL communicators
    concurrently".
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.nccl.communicator import run_in_threads
from asyncddp.transport.cuda.nccl.coordination_messages import (
    CoordinationMessage,
    decode_message,
    encode_message,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import CHANNELS, CupyBindings
from asyncddp.transport.cuda.nccl.leader_follower import PairChannelFollower, PairChannelLeader
from asyncddp.transport.cuda.nccl.pair_channel import PairChannel

_DEFAULT_BUDGET = 8  # communicators where it is not known how large a GPU is


class CommunicatorBudget:
    """Number of NCCL communicators that a rank may still open, by its GPU's multiprocessors.

    Args:
        left: Number of communicators left.

    Example:
        >>> budget = CommunicatorBudget(1)
        >>> budget.take(), budget.take()
        (True, False)
    """

    def __init__(self, left: int) -> None:
        self._left = left

    @classmethod
    def of(cls, device: torch.device) -> CommunicatorBudget:
        """Make a budget that takes half of a device's multiprocessors, but at least one."""
        if device.type != "cuda":
            return cls(_DEFAULT_BUDGET)
        text = os.environ.get("NCCL_MAX_P2P_NCHANNELS", "")
        channels = int(text) if text.isdecimal() and int(text) > 0 else CHANNELS
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(max(1, processors // (2 * channels)))

    def take(self) -> bool:
        """Take one communicator; return whether there was one left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give(self) -> None:
        """Return one communicator."""
        self._left += 1


class NCCLPointToPoint:
    """Point-to-point messages of one rank by NCCL, through one communicator for each peer.

    Args:
        rank: This rank.
        streams: Streams of the device.
        library: The bindings of cupy.
        message_transport: A host transport between the ranks, for coordination messages.
        budget: Budget of communicators.
        stage: Stages a message through the host: takes the bytes, the peer, the tag and whether
            it is a send.
    """

    def __init__(
        self,
        rank: int,
        streams: DeviceStreams,
        library: CupyBindings,
        message_transport: Transport,
        budget: CommunicatorBudget,
        stage: Callable[[torch.Tensor, int, int, bool], Request],
    ) -> None:
        self.rank, self.streams, self.library = rank, streams, library
        self._message_transport, self._budget, self._stage = message_transport, budget, stage
        self._pairs: dict[int, PairChannel] = {}
        self._closed = False

    def begin(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Request:
        """Post a send or a receive.

        Raises:
            PeerError: Messages with this peer cannot go on.
        """
        ready = self.streams.record_event(StreamRole.COMPUTE)
        return self._with(peer).begin(as_bytes(data), tag, ready, sends=sends)

    def _with(self, peer: int) -> PairChannel:
        if peer not in self._pairs:
            side = PairChannelLeader if self.rank < peer else PairChannelFollower
            self._pairs[peer] = side(self, peer)
        return self._pairs[peer]

    def drive(self) -> None:
        """Handle all coordination messages, and advance all pairs."""
        if self._closed:
            return
        for peer, message in self._message_transport.poll():
            pair = self._with(peer)
            try:
                pair.handle_message(decode_message(message, peer))
            except PeerError as problem:
                pair.fail(f"rank {self.rank}: {problem}")
        for pair in self._pairs.values():
            pair.move()

    def tell(self, peer: int, message: CoordinationMessage) -> None:
        """Send a coordination message."""
        if not self._closed:
            self._message_transport.post(peer, encode_message(message))

    def acquire_budget(self) -> bool:
        """Take one communicator from the budget; return whether there was one."""
        return self._budget.take()

    def release_budget(self) -> None:
        """Return one communicator to the budget."""
        self._budget.give()

    def stage(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Request:
        """Stage a message through the host."""
        return self._stage(data, peer, tag, sends)

    def close(self) -> None:
        """Free all communicators; waits two seconds at most."""
        if self._closed:
            return
        self._closed = True
        endings = [pair.closer() for pair in self._pairs.values()]
        run_in_threads([end for end in endings if end is not None])
        self._message_transport.close()
