"""A round of averaging under way: what went out of each bucket, and how the result is taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncddp.algorithms.stopwatch import exposed
from asyncddp.context.context import use
from asyncddp.engine import Handle

if TYPE_CHECKING:
    from asyncddp.algorithms.mixer import Mixer

__all__ = ["Messages", "Round", "Route"]


class Round(ABC):
    """One round of one wrapper."""

    @abstractmethod
    def start(self, index: int, flat: torch.Tensor) -> None:
        """Send bucket ``index``; leave it alone until :meth:`install`."""

    @abstractmethod
    def started(self, index: int) -> bool:
        """Whether that bucket was sent."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no bucket is read by anybody any more.

        Raises:
            PeerError: A neighbour failed, or does something else.
        """

    @abstractmethod
    def install(self, arrived: Callable[[int], None] | None = None) -> None:
        """Put the averages into the buckets, and end the round.

        Args:
            arrived: Called with the index of each bucket before its average is put in place.

        Raises:
            PeerError: A neighbour failed, or does something else.
        """


@dataclass(frozen=True)
class Route:
    """One round of messages on one rank.

    Attributes:
        start: Starts averaging a flat tensor under a name.
        cost: Bytes that this rank sends for a flat tensor.
        way: The short way of averaging such a tensor in place, if there is one: where neighbours
            read each other's memory, nothing is gained by starting early.
    """

    start: Callable[[torch.Tensor, str], Handle[torch.Tensor]]
    cost: Callable[[torch.Tensor], int]
    way: Callable[[torch.Tensor, str], Callable[[], bool] | None] = lambda flat, name: None


class Messages(Round):
    """A round in which neighbours, or all ranks, exchange messages and wait for each other's.

    Args:
        mixer: Whose round.
        route: Where to.
    """

    def __init__(self, mixer: Mixer, route: Route) -> None:
        self._mixer, self._route = mixer, route
        self._under_way: dict[int, tuple[torch.Tensor, Handle[torch.Tensor]]] = {}
        self._to_do: dict[int, tuple[torch.Tensor, Callable[[], bool]]] = {}

    @exposed
    def start(self, index: int, flat: torch.Tensor) -> None:
        """Send a bucket, or find the short way that :meth:`install` takes."""
        mixer, name = self._mixer, f"{self._mixer.label}.bucket{index}"
        way = self._route.way(flat, name) if mixer.algorithm.plain else None
        if way is not None:
            mixer.bytes_sent += self._route.cost(flat)
            self._to_do[index] = flat, way
            return
        with use(mixer.context), torch.no_grad():
            sent = mixer.algorithm.outgoing(flat)
            handle = self._route.start(sent, name)
        mixer.bytes_sent += self._route.cost(sent)
        self._under_way[index] = flat, handle

    def started(self, index: int) -> bool:
        """Whether that bucket was sent."""
        return index in self._under_way or index in self._to_do

    @exposed
    def settle(self) -> None:
        """Wait until everything that was sent has come back."""
        for _, handle in self._under_way.values():
            handle.wait()

    @exposed
    def install(self, arrived: Callable[[int], None] | None = None) -> None:
        """Take each average as it comes."""
        with torch.no_grad():
            for index, (flat, way) in self._to_do.items():
                if arrived is not None:
                    arrived(index)
                if not way():
                    self._catch_up(index, flat)
            for index, (flat, handle) in self._under_way.items():
                mixed = handle.wait()
                if arrived is not None:
                    arrived(index)
                self._mixer.algorithm.incoming(flat, mixed)
        self._mixer.round += 1

    def _catch_up(self, index: int, flat: torch.Tensor) -> None:
        """Average a bucket the long way, since the short one is closed by now."""
        mixer = self._mixer
        with use(mixer.context):
            handle = self._route.start(flat, f"{mixer.label}.bucket{index}")
        mixer.algorithm.incoming(flat, handle.wait())
