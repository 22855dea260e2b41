"""Leader (lower rank) and follower of two ranks' NCCL messages: the leader decides the order."""

from __future__ import annotations

import time

from typing_extensions import override

from asyncddp.transport.cuda.nccl.coordination_messages import (
    CancelConfirmedMessage,
    CancelMessage,
    CommunicatorFailedMessage,
    CoordinationMessage,
    GroupLaunchMessage,
    OpenCommunicatorMessage,
    OpenRefusedMessage,
    SizeMismatchMessage,
    UniqueIdMessage,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import create_unique_id
from asyncddp.transport.cuda.nccl.match_table import MatchTable, RequestDescriptor, RequestMatch
from asyncddp.transport.cuda.nccl.pair_channel import PairChannel, PairResources

_GROUPING_DELAY = 0.0002  # seconds in which the other direction may join a group


class PairChannelLeader(PairChannel):
    """Lower rank's side of two ranks' NCCL messages: matches sends with receives, in order."""

    pair_rank = 0

    def __init__(self, resources: PairResources, peer: int) -> None:
        super().__init__(resources, peer)
        self._match_table = MatchTable()
        self._waiting_since: float | None = None

    @override
    def announce(self, descriptor: RequestDescriptor) -> None:
        self._match_table.add_local(descriptor)

    @override
    def cancelled(self, number: int) -> None:
        self._match_table.cancel(number, local=True)
        del self._waiting[number]

    @override
    def handle_message(self, message: CoordinationMessage) -> None:
        if isinstance(message, CommunicatorFailedMessage):
            self.fail(message.why, tell=False)
        elif self.failure is not None or self.staged:
            return
        elif isinstance(message, OpenCommunicatorMessage):
            self._answer_open(message)
        elif isinstance(message, RequestDescriptor):
            self._match_table.add_remote(message)
        elif isinstance(message, CancelMessage) and self._match_table.cancel(
            message.number, local=False
        ):
            self._resources.tell(self._peer, CancelConfirmedMessage(message.number))

    def _answer_open(self, message: OpenCommunicatorMessage) -> None:
        if message.has_budget and self._resources.budget.acquire(blocking=False):
            try:
                unique_id = create_unique_id(self._resources.library.nccl)
            except RuntimeError as problem:
                self.fail(f"rank {self._resources.rank}: NCCL makes no identity ({problem})")
                return
            self._resources.tell(self._peer, UniqueIdMessage(unique_id))
            self.open(unique_id)
        else:
            self._resources.tell(self._peer, OpenRefusedMessage())
            self.stage_all()

    @override
    def move(self) -> None:
        if self._communicator is not None and self.failure is None and self._launch_is_due():
            self._launch_group(self._match_table.take())
        super().move()

    def _launch_is_due(self) -> bool:
        """Return whether to launch the matches; delayed where the other direction may join."""
        if not self._match_table.has_matches():
            return False
        if self._match_table.is_one_way():
            now = time.monotonic()
            self._waiting_since = self._waiting_since or now
            if now - self._waiting_since < _GROUPING_DELAY:
                return False
        self._waiting_since = None
        return True

    def _launch_group(self, matches: list[RequestMatch]) -> None:
        requests, numbers = [], []
        for match in matches:
            request = self._waiting.pop(match.local.number)
            if match.local.size != match.remote.size:
                self._resources.tell(
                    self._peer, SizeMismatchMessage(match.remote.number, match.local.size)
                )
                self.fail_size_mismatch(request, match.remote.size)
                continue
            requests.append(request)
            numbers.append(match.remote.number)
        if requests:
            self._resources.tell(self._peer, GroupLaunchMessage(tuple(numbers)))
            self._launches.append(requests)


class PairChannelFollower(PairChannel):
    """Higher rank's side of two ranks' NCCL messages: launches them as the lower rank decides."""

    pair_rank = 1

    def __init__(self, resources: PairResources, peer: int) -> None:
        super().__init__(resources, peer)
        self._open_requested = False

    @override
    def announce(self, descriptor: RequestDescriptor) -> None:
        if not self._open_requested:
            self._open_requested, self._budget = (
                True,
                self._resources.budget.acquire(blocking=False),
            )
            self._resources.tell(self._peer, OpenCommunicatorMessage(self._budget))
        self._resources.tell(self._peer, descriptor)

    @override
    def cancelled(self, number: int) -> None:
        # it stays listed until the leader confirms: a group launch that comes before that includes
        # it, and its bytes are dropped
        self._resources.tell(self._peer, CancelMessage(number))

    @override
    def handle_message(self, message: CoordinationMessage) -> None:
        if isinstance(message, CommunicatorFailedMessage):
            self.fail(message.why, tell=False)
        elif self.failure is not None:
            return
        elif isinstance(message, UniqueIdMessage):
            self.open(message.unique_id)
        elif isinstance(message, OpenRefusedMessage):
            if self._budget:
                self._resources.budget.release()
            self.stage_all()
        elif isinstance(message, GroupLaunchMessage):
            self._launches.append([self._waiting.pop(number) for number in message.numbers])
        elif isinstance(message, SizeMismatchMessage):
            self.fail_size_mismatch(self._waiting.pop(message.number), message.size)
        elif isinstance(message, CancelConfirmedMessage):
            del self._waiting[message.number]
