"""Baseline of an exchange with neighbours over plain TCP sockets, one for each pair of ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncddp.topology import Neighbors, Schedule
from benchmarks.baselines import mixer
from benchmarks.tables import Call, RankGroup

_TIMEOUT = 60.0  # seconds without a byte


class SocketMesh:
    """Connections of this rank to all others.

    Args:
        world: The ranks; all of them call this.
        address: Of this rank's host on the network to be measured.
    """

    def __init__(self, world: RankGroup, address: str) -> None:
        self._world = world
        self._threads = ThreadPoolExecutor(2 * world.size, "socket")
        with socket.create_server((address, 0), backlog=world.size) as listener:
            places = world.comm.allgather(listener.getsockname())
            self._peers = {peer: self._call(places[peer]) for peer in range(world.rank)}
            listener.settimeout(_TIMEOUT)
            for _ in range(world.rank + 1, world.size):
                caller, _ = listener.accept()
                self._peers[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "big")] = caller
        for peer in self._peers.values():
            peer.settimeout(_TIMEOUT)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _call(self, place: tuple[str, int]) -> socket.socket:
        peer = socket.create_connection(place, timeout=_TIMEOUT)
        peer.sendall(self._world.rank.to_bytes(4, "big"))
        return peer

    def prepare(self, schedule: Schedule, nbytes: int) -> Call:
        """Exchange with the neighbours of the round, then average what came."""
        return mixer(self._world, schedule, nbytes, self._exchange)

    def _exchange(self, near: Neighbors, mine: torch.Tensor, others: list[torch.Tensor]) -> None:
        """Send and receive all at once."""
        works = [
            self._threads.submit(self._peers[peer].sendall, _bytes_of(mine))
            for peer in near.dst_ranks
        ]
        works += [
            self._threads.submit(_receive, self._peers[peer], _bytes_of(other))
            for peer, other in zip(near.src_weights, others, strict=True)
        ]
        for work in works:
            work.result()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("a rank has closed its connection")
        into = into[count:]
