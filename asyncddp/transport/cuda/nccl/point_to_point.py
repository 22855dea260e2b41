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

import threading
from collections.abc import Callable

import torch

from asyncddp.device.streams import DeviceStreams, StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request, Transport
from asyncddp.transport.cuda.nccl.communicator import run_in_threads
from asyncddp.transport.cuda.nccl.coordination_messages import decode_message
from asyncddp.transport.cuda.nccl.cupy_bindings import CupyBindings
from asyncddp.transport.cuda.nccl.leader_follower import PairChannelFollower, PairChannelLeader
from asyncddp.transport.cuda.nccl.pair_channel import PairChannel, PairResources


class NCCLPointToPoint:
    """Point-to-point messages of one rank by NCCL, through one communicator for each peer."""

    def __init__(
        self,
        rank: int,
        streams: DeviceStreams,
        library: CupyBindings,
        message_transport: Transport,
        budget: threading.Semaphore,
        stage: Callable[[torch.Tensor, int, int, bool], Request],
    ) -> None:
        self.resources = PairResources(
            rank, streams, library, message_transport, budget, stage, self.drive
        )
        self._pairs: dict[int, PairChannel] = {}

    def begin(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Request:
        """Post a send or a receive.

        Raises:
            PeerError: Messages with this peer cannot go on.
        """
        ready = self.resources.streams.record_event(StreamRole.COMPUTE)
        return self._with(peer).begin(as_bytes(data), tag, ready, sends=sends)

    def _with(self, peer: int) -> PairChannel:
        if peer not in self._pairs:
            side = PairChannelLeader if self.resources.rank < peer else PairChannelFollower
            self._pairs[peer] = side(self.resources, peer)
        return self._pairs[peer]

    def drive(self) -> None:
        """Handle all coordination messages, and advance all pairs."""
        if self.resources.closed:
            return
        for peer, message in self.resources.message_transport.poll():
            pair = self._with(peer)
            try:
                pair.handle_message(decode_message(message, peer))
            except PeerError as problem:
                pair.fail(f"rank {self.resources.rank}: {problem}")
        for pair in self._pairs.values():
            pair.move()

    def close(self) -> None:
        """Free all communicators; waits two seconds at most."""
        if self.resources.closed:
            return
        self.resources.closed = True
        endings = [pair.closer() for pair in self._pairs.values()]
        run_in_threads([end for end in endings if end is not None])
        self.resources.message_transport.close()
