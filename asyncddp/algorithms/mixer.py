"""Rounds of averaging: starts them over flat buckets, counts them, keeps graph and method apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncddp.algorithms.communication import COMMUNICATIONS, Communication, HandSet, Route
from asyncddp.algorithms.contract import Algorithm, How
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.engine import Handle
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce
from topology import GraphOrSchedule, Schedule, TopologyError, as_schedule, describe

__all__ = ["Mixer", "Round"]


class Mixer:
    """What the rounds of one wrapper have in common.

    Args:
        context: The world.
        algorithm: The method.
        communication: Name of a kind of communication; None for the first that the method allows.
        topology: Graph or schedule; None for the context's, read in every round.
        label: Begins the names of the messages; equal on all ranks.

    Attributes:
        hand: Weights set by hand.
        round: Rounds completed so far: which round of the schedule comes next.
        bytes_sent: Payload bytes sent to peers so far.

    Raises:
        UnknownNameError: There is no communication of that name.
        ArgumentError: The method does not allow it.
        TopologyError: The topology does not fit the method or the number of ranks.
    """

    communication: Communication

    def __init__(
        self,
        context: Context,
        algorithm: Algorithm,
        communication: str | None,
        topology: GraphOrSchedule | None,
        label: str,
    ) -> None:
        self.context, self.algorithm, self.topology = context, algorithm, topology
        self.label = label
        self.hand = HandSet()
        self.round = 0
        self.bytes_sent = 0
        self._accepted: GraphOrSchedule | None = None
        self._schedule: Schedule | None = None
        self.choose(communication or self._default())

    def _default(self) -> str:
        return next(k for k in COMMUNICATIONS if COMMUNICATIONS[k].how is self.algorithm.how[0])

    @property
    def silent(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.context.size == 1

    def mean(self, value: Any) -> Any:
        """The average of a scalar over all ranks, where the communication is global.

        Args:
            value: A tensor or number; anything else is given back.
        """
        if self.silent or self.communication.how is not How.GLOBAL:
            return value
        if not isinstance(value, (torch.Tensor, float)):
            return value
        exact = torch.float64 if isinstance(value, float) else None
        tensor = torch.as_tensor(value, dtype=exact).detach()
        with use(self.context):
            mean = allreduce(tensor)
        return mean if isinstance(value, torch.Tensor) else float(mean)

    def choose(self, name: str) -> None:
        """Take another kind of communication from the next round on.

        Raises:
            UnknownNameError: There is none of that name.
            ArgumentError: The method does not allow it.
        """
        chosen = COMMUNICATIONS[name]()
        if chosen.how is not None and chosen.how not in self.algorithm.how:
            allowed = [
                kind for kind in COMMUNICATIONS if COMMUNICATIONS[kind].how in self.algorithm.how
            ]
            raise ArgumentError(
                f"argument communication: {self.algorithm.name} works with "
                f"{', '.join([*allowed, 'empty'])}, got {name!r}"
            )
        self.communication = chosen
        self._accepted = self._schedule = None
        if self.topology is not None:
            self._accept(self.topology)

    def begin(self) -> Round | None:
        """Open the next round with the weights as they are now; None where nothing is sent.

        Raises:
            TopologyError: The topology in use does not fit the method or the number of ranks.
            ArgumentError: Weights set by hand that cannot be.
        """
        if self.silent:
            return None
        by_hand = self.communication.by_hand(self.hand)
        if not any(value is not None for value in by_hand.values()):
            given = self.topology
            if given is None:
                given = self.communication.inherited(self.context)
            if given is not None and given is not self._accepted:
                self._accept(given)
        schedule = None if self.topology is None else self._schedule
        route = self.communication.route(self.context, schedule, self.hand, self.round)
        return None if route is None else Round(self, route)

    def _accept(self, given: GraphOrSchedule) -> None:
        """Look at a topology once, when it is first used."""
        places = self.communication.places(self.context)
        if places is None:
            return
        schedule = as_schedule(given)
        if schedule.n != places:
            raise TopologyError(
                f"argument topology: {describe(given)} has {schedule.n} nodes, but "
                f"{self.communication.name} averages among {places} here; build it with n={places}"
            )
        self.algorithm.check(given)
        self._accepted, self._schedule = given, schedule


class Round:
    """One round under way: flat tensors that were sent, and the averages that come back.

    Args:
        mixer: Whose round.
        route: Where to.
    """

    def __init__(self, mixer: Mixer, route: Route) -> None:
        self._mixer, self._route = mixer, route
        self._under_way: dict[int, tuple[torch.Tensor, Handle[torch.Tensor]]] = {}
        self._to_do: dict[int, tuple[torch.Tensor, Callable[[], bool]]] = {}

    def start(self, index: int, flat: torch.Tensor) -> None:
        """Send bucket ``index``; leave it alone until :meth:`install`."""
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

    def settle(self) -> None:
        """Wait until everything that was sent has come back.

        Raises:
            PeerError: A neighbour failed, or does something else.
        """
        for _, handle in self._under_way.values():
            handle.wait()

    def install(self, arrived: Callable[[int], None] | None = None) -> None:
        """Put the averages into the buckets, each as it comes, and end the round.

        Args:
            arrived: Called with the index of each bucket before its average is put in place.

        Raises:
            PeerError: A neighbour failed, or does something else.
        """
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
