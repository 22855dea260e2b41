"""Point-to-point messages by NCCL, with one communicator per pair of ranks, opened on first use.

NCCL's sends and receives match by order, but those of a transport by peer and tag in any order. So
the two ranks of a pair agree by :mod:`~asyncddp.transport.cuda.nccl.coordination_messages` on the
next launch: all requests that both have posted, as one group, in both directions.

**Why ranks cannot deadlock.** A kernel of NCCL occupies its GPU until its peers have joined it, so
no work may wait, on any rank, for a kernel that waits for this work. One communicator for all would
need rounds on which all ranks agree; with one for each pair it is enough that

- nothing waits for a kernel before all its ranks have posted it: a rank posts a message or a
  collective by an event on the compute stream, and makes that stream wait for the kernel only once
  two ranks have matched a message, or all have entered a collective. All that a kernel waits for
  was posted earlier, by which no circle can close;
- the host never waits for a device, and launches a group as soon as it hears of it; opening a
  communicator and its first exchange, in which NCCL connects the two, have a thread of their own;
- every pair has a stream and a hardware queue to itself, for streams that share a queue run in the
  order of their launches: ``CUDA_DEVICE_MAX_CONNECTIONS`` is set to 32 (CUDA's default is 8);
- all kernels fit on the GPU at once: messages take at most ``NCCL_MAX_P2P_NCHANNELS`` channels (8
  unless set), each one multiprocessor, and all pairs half of them. A rank opens no more
  communicators than there are queues and room for; what goes to further peers is staged.

The variable of CUDA counts only if CUDA is first used after ``init()``. ``set_topology`` begins to
open pairs, best while the GPU is idle. Messages can pass their deadline, at which the pair is
aborted, where a call of CUDA waits for the device, as in opening a pair or loading a kernel on its
first use. Between four ranks on one GPU, with kernels loaded as they were needed, none did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import PeerError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.base import Request
from asyncddp.transport.cuda.nccl.communicator import run_in_threads
from asyncddp.transport.cuda.nccl.coordination_messages import decode_message
from asyncddp.transport.cuda.nccl.leader_follower import PairChannelFollower, PairChannelLeader
from asyncddp.transport.cuda.nccl.pair_channel import PairChannel, SharedChannelResources


@dataclass(eq=False)
class NCCLPointToPoint(SharedChannelResources):
    """Point-to-point messages of one rank by NCCL, through one channel per peer."""

    _pairs: dict[int, PairChannel] = field(default_factory=dict, init=False)

    def begin(self, data: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Request:
        """Post a send or a receive; raise a PeerError if the channel to this peer is broken."""
        ready = self.streams.record_event(StreamRole.COMPUTE)
        return self._pair_with(peer).begin(as_bytes(data), tag, ready, sends=sends)

    def connect(self, peers: Iterable[int]) -> None:
        """Start to open communicators with some peers, as far as there is room."""
        for peer in peers:
            self._pair_with(peer).connect()
        self.drive()

    def watch(self, timeout: float) -> bool:
        """Advance all messages; return whether any is still running on the device."""
        self.drive()
        return any([pair.watch(timeout) for pair in self._pairs.values()])

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
        """Free all communicators, waiting at most two seconds."""
        if self.closed:
            return
        for pair in self._pairs.values():
            pair.leave()
        self.closed = True
        run_in_threads([pair.closer() for pair in self._pairs.values()], self.streams)
        self.message_transport.close()
