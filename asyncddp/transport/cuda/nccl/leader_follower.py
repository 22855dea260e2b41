"""Leader and follower ends of an NCCL pair channel: the lower rank decides the launch order."""

from __future__ import annotations

import time
from collections import deque
from typing import TypeAlias

from typing_extensions import override

from asyncddp.transport.cuda.nccl import coordination_messages as messages
from asyncddp.transport.cuda.nccl.communicator import NCCLCommunicator
from asyncddp.transport.cuda.nccl.cupy_bindings import NCCL_ERRORS, create_unique_id
from asyncddp.transport.cuda.nccl.pair_channel import PairChannel, SharedChannelResources

_GROUPING_DELAY = 0.0002  # seconds in which the other direction may join a group

RequestMatch: TypeAlias = tuple[messages.TransferPostedMessage, messages.TransferPostedMessage]
"""Matched send and receive of two ranks, the leader's request first."""
_Posted: TypeAlias = dict[tuple[bool, int], deque[messages.TransferPostedMessage]]
"""Posted requests, keyed by direction (the leader sends) and tag."""


class MatchTable:
    """Table in which the leader matches posted sends with posted receives of both ranks.

    Requests with equal direction and tag match in the order in which each rank has posted them.
    """

    def __init__(self) -> None:
        self._local: _Posted = {}
        self._remote: _Posted = {}

    def add(self, one: messages.TransferPostedMessage, *, local: bool) -> None:
        """Add a request of the leader (``local``), or of the follower."""
        side = self._local if local else self._remote
        side.setdefault((one.sends == local, one.tag), deque()).append(one)

    def cancel(self, one: messages.TransferPostedMessage, *, local: bool) -> None:
        """Remove a cancelled request, unless it has been matched."""
        side, key = (self._local if local else self._remote), (one.sends == local, one.tag)
        if one in side.get(key, ()):
            side[key].remove(one)
            if not side[key]:
                del side[key]

    def matching_keys(self) -> list[tuple[bool, int]]:
        """List direction and tag of all matches, in launch order."""
        return [key for key in self._local if key in self._remote]

    def is_one_way(self) -> bool:
        """Return whether all matches have one direction while the leader waits for the other."""
        ways = {sends for sends, _ in self.matching_keys()}
        return len(ways) == 1 and any(sends not in ways for sends, _ in self._local)

    def take(self) -> list[RequestMatch]:
        """Remove and return all matches, in launch order."""
        found = []
        for key in self.matching_keys():
            local, remote = self._local[key], self._remote[key]
            while local and remote:
                found.append((local.popleft(), remote.popleft()))
            for side in (self._local, self._remote):
                if not side[key]:
                    del side[key]
        return found


class PairChannelLeader(PairChannel):
    """Leader's (lower rank's) end of an NCCL pair channel: orders both ranks' transfers."""

    pair_rank = 0

    def __init__(self, resources: SharedChannelResources, peer: int) -> None:
        super().__init__(resources, peer)
        self._match_table = MatchTable()
        self._waiting_since: float | None = None

    @override
    def announce(self, descriptor: messages.TransferPostedMessage) -> None:
        self._match_table.add(descriptor, local=True)

    @override
    def cancel(self, descriptor: messages.TransferPostedMessage) -> None:
        self._match_table.cancel(descriptor, local=True)

    @override
    def follow(self, message: messages.CoordinationMessage) -> None:
        match message:
            case messages.OpenCommunicatorMessage():
                self._answer_open(message)
            case messages.TransferPostedMessage():
                self._match_table.add(message, local=False)
            case messages.CancelMessage():
                self._match_table.cancel(message.descriptor, local=False)

    def _answer_open(self, message: messages.OpenCommunicatorMessage) -> None:
        if not (message.has_budget and self._resources.budget.acquire(blocking=False)):
            self._resources.tell(self._peer, messages.OpenRefusedMessage())
            self.stage_all()
            return
        try:
            unique_id = create_unique_id(self._resources.library.nccl)
        except NCCL_ERRORS as problem:
            self.fail(f"rank {self._resources.rank}: NCCL makes no identity ({problem})")
            return
        self._resources.tell(self._peer, messages.UniqueIdMessage(unique_id))
        self.open(unique_id)

    @override
    def move(self) -> None:
        super().move()
        if self._communicator is not None and self.failure is None and self._launch_is_due():
            self._launch_group(self._communicator, self._match_table.take())

    def _launch_is_due(self) -> bool:
        """Return whether to launch the matches now, or wait for the other direction to join."""
        if not self._match_table.matching_keys():
            return False
        if self._match_table.is_one_way():
            now = time.monotonic()
            self._waiting_since = self._waiting_since or now
            if now - self._waiting_since < _GROUPING_DELAY:
                return False
        self._waiting_since = None
        return True

    def _launch_group(self, communicator: NCCLCommunicator, matches: list[RequestMatch]) -> None:
        requests, numbers = [], []
        for local, remote in matches:
            request = self._waiting.pop(local.number)
            if local.size == remote.size:
                requests.append(request)
                numbers.append(remote.number)
            else:
                self._resources.tell(
                    self._peer, messages.SizeMismatchMessage(remote.number, local.size)
                )
                self.fail_size_mismatch(request, remote.size)
        if requests and self.launch(communicator, requests):
            self._resources.tell(self._peer, messages.GroupLaunchMessage(tuple(numbers)))


class PairChannelFollower(PairChannel):
    """Follower's (higher rank's) end of an NCCL pair channel: launches in the leader's order."""

    pair_rank = 1
    _has_budget: bool | None = None
    """True if this rank may open the communicator; None before it has requested one."""

    @override
    def connect(self) -> None:
        if self._has_budget is None:
            self._has_budget = self._resources.budget.acquire(blocking=False)
            self._resources.tell(self._peer, messages.OpenCommunicatorMessage(self._has_budget))

    @override
    def announce(self, descriptor: messages.TransferPostedMessage) -> None:
        self.connect()
        self._resources.tell(self._peer, descriptor)

    @override
    def cancel(self, descriptor: messages.TransferPostedMessage) -> None:
        self._resources.tell(self._peer, messages.CancelMessage(descriptor))

    @override
    def follow(self, message: messages.CoordinationMessage) -> None:
        match message:
            case messages.UniqueIdMessage():
                self.open(message.unique_id)
            case messages.OpenRefusedMessage():
                if self._has_budget:
                    self._resources.budget.release()
                self.stage_all()
            case messages.GroupLaunchMessage():
                self._launches.append([self._waiting.pop(number) for number in message.numbers])
            case messages.SizeMismatchMessage():
                self.fail_size_mismatch(self._waiting.pop(message.number), message.size)
