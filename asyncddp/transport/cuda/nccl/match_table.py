"""Matching of two ranks' NCCL sends with receives, in order; does no communication itself."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

from asyncddp.transport.cuda.nccl.coordination_messages import RequestDescriptor


class RequestMatch(NamedTuple):
    """Matched pair of two ranks' requests: a send of one and the receive of the other."""

    local: RequestDescriptor
    remote: RequestDescriptor


_MatchKey: TypeAlias = tuple[bool, int]  # whether the leader sends, and the tag


class MatchTable:
    """Table in which the lower of two ranks matches the posted sends and receives of both.

    Requests of equal direction and tag match in the order in which each rank has posted them.
    """

    def __init__(self) -> None:
        self._local: dict[_MatchKey, deque[RequestDescriptor]] = {}
        self._remote: dict[_MatchKey, deque[RequestDescriptor]] = {}

    def add_local(self, descriptor: RequestDescriptor) -> None:
        """Add a request of the leader."""
        self._local.setdefault((descriptor.sends, descriptor.tag), deque()).append(descriptor)

    def add_remote(self, descriptor: RequestDescriptor) -> None:
        """Add a request of the follower."""
        self._remote.setdefault((not descriptor.sends, descriptor.tag), deque()).append(descriptor)

    def cancel(self, one: RequestDescriptor, *, local: bool) -> None:
        """Remove a request that one rank has given up, unless it has been matched."""
        side, key = (self._local if local else self._remote), (one.sends == local, one.tag)
        if one in side.get(key, ()):
            side[key].remove(one)
            if not side[key]:
                del side[key]

    def _matching_keys(self) -> list[_MatchKey]:
        return [key for key in self._local if key in self._remote]

    def is_one_way(self) -> bool:
        """Return whether all matches go one way while the leader waits for the other direction."""
        ways = {sends for sends, _ in self._matching_keys()}
        return len(ways) == 1 and any(sends not in ways for sends, _ in self._local)

    def has_matches(self) -> bool:
        """Return whether there is a match."""
        return bool(self._matching_keys())

    def take(self) -> list[RequestMatch]:
        """Remove and return all matches, in the order in which they are launched."""
        found = []
        for key in self._matching_keys():
            local, remote = self._local[key], self._remote[key]
            while local and remote:
                found.append(RequestMatch(local.popleft(), remote.popleft()))
            for side in (self._local, self._remote):
                if not side[key]:
                    del side[key]
        return found
