"""Point-to-point messages by NCCL: a communicator for every two ranks, opened on first use.

NCCL's sends and receives match by order, and ours by peer and tag in any order. So the two ranks of
a pair agree by :mod:`~asyncddp.transport.cuda.nccl.coordination_messages` what both launch next:
what is ready on both sides, as one group, in both directions.

**Why ranks cannot deadlock.** A kernel of NCCL occupies its GPU until its peer has joined it. With
several communicators, one that finds no room could hold up the rank that others wait for. Here

- the host never waits: opening a communicator and its first exchange, in which NCCL connects the
  two ranks, have a thread of their own, and each rank launches a group as soon as it hears of it;
- every pair has a stream to itself, so that no group waits behind another pair's;
- the kernels of all pairs fit on the GPU at once: messages take at most ``NCCL_MAX_P2P_NCHANNELS``
  channels (8 unless set), a channel takes one multiprocessor, and a rank opens no more
  communicators than fill half of them. What goes to further peers is staged.

Messages can still pass their deadline where a call of CUDA inside NCCL's opening waits for the
device, or with ``NCCL_LAUNCH_ORDER_IMPLICIT=1``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from typing_extensions import override

from asyncddp.device.streams import StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.nccl.communicator import run_in_threads
from asyncddp.transport.cuda.nccl.coordination_messages import decode_message
from asyncddp.transport.cuda.nccl.leader_follower import PairChannelFollower, PairChannelLeader
from asyncddp.transport.cuda.nccl.pair_channel import PairChannel, SharedChannelResources


@dataclass(eq=False)
class NCCLPointToPoint(SharedChannelResources):
    """Point-to-point messages of one rank by NCCL, through one communicator for each peer."""

    _pairs: dict[int, PairChannel] = field(default_factory=dict, init=False)

    def begin(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Request:
        """Post a send or a receive; a PeerError if messages with this peer cannot go on."""
        ready = self.streams.record_event(StreamRole.COMPUTE)
        return self._pair_with(peer).begin(as_bytes(data), tag, ready, sends=sends)

    def _pair_with(self, peer: int) -> PairChannel:
        if peer not in self._pairs:
            side = PairChannelLeader if self.rank < peer else PairChannelFollower
            self._pairs[peer] = side(self, peer)
        return self._pairs[peer]

    @override
    def drive(self) -> None:
        if self.closed:
            return
        for peer, message in self.message_transport.poll():
            pair = self._pair_with(peer)
            try:
                pair.handle_message(decode_message(message, peer))
            except PeerError as problem:
                pair.fail(f"rank {self.rank}: {problem}")
        for pair in self._pairs.values():
            pair.move()

    def close(self) -> None:
        """Free all communicators; waits two seconds at most."""
        if self.closed:
            return
        self.closed = True
        run_in_threads([pair.closer() for pair in self._pairs.values()], self.streams)
        self.message_transport.close()
