"""Rounds of averaging: starts them over flat buckets, counts them, keeps graph and method apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.algorithms.bucket_windows import BucketWindows
from asyncddp.algorithms.communication import COMMUNICATIONS, Communication, HandSet
from asyncddp.algorithms.contract import Algorithm, How
from asyncddp.algorithms.joining import Attendance
from asyncddp.algorithms.rounds import Round
from asyncddp.algorithms.stopwatch import Stopwatch
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.memory.allocate import values
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
        exposed: The time that rounds have taken on the caller's thread, to send, wait and mix.
        attendance: Says before each round who still trains, inside ``join``.
        windows: Those of one-sided communication, while there are any.
        force_barrier: Whether ranks meet before and after they mix what is in windows.
        max_staleness: How many steps a neighbour may be behind before it is waited for.

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
        self.exposed = Stopwatch()
        self.attendance: Attendance | None = None
        self.windows = BucketWindows(context, label, algorithm)
        self.force_barrier = False
        self.max_staleness: int | None = None
        self._accepted: GraphOrSchedule | None = None
        self._schedule: Schedule | None = None
        self.choose(communication or self._default())

    def _default(self) -> str:
        return next(k for k in COMMUNICATIONS if COMMUNICATIONS[k].how is self.algorithm.how[0])

    @property
    def silent(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.context.size == 1

    @property
    def step_scale(self) -> float:
        """By which updates are scaled, so that ranks of different speed count alike."""
        rates = self.windows.rates
        return 1.0 if rates is None or self.force_barrier else rates.scale

    def mean(self, value: Any) -> Any:
        """The average of a scalar over all ranks, where the communication is global.

        Args:
            value: A tensor or number; anything else is given back.
        """
        if self.silent or self.communication.how is not How.GLOBAL:
            return value
        if not isinstance(value, (torch.Tensor, float)):
            return value
        tensor = values(value, torch.float64) if isinstance(value, float) else value.detach()
        with use(self.context):
            roll = self.attendance
            mean = allreduce(tensor) if roll is None else roll.mean(self.label, tensor)
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

    def lay_out(self, flats: Sequence[torch.Tensor]) -> None:
        """Say what rounds will be about; collective where that needs windows.

        Args:
            flats: Flat tensors, alike on all ranks.

        Raises:
            TopologyError: The topology in use does not fit the method or the number of ranks.
            ArgumentError: Windows cannot be made along it.
        """
        if not self.silent:
            self.windows.lay_out(flats)
            self.communication.lay_out(self)

    def begin(self) -> Round | None:
        """Open the next round with the weights as they are now; None where nothing is sent.

        Raises:
            NotInitializedError: The world has ended, or this process was forked from its rank.
            TopologyError: The topology in use does not fit the method or the number of ranks.
            ArgumentError: Weights set by hand that cannot be.
        """
        if self.silent:
            return None
        self.context.engine.insist(self.label)
        return self.communication.begin(self, self.own())

    def own(self) -> Schedule | None:
        """The wrapper's own topology, None for the context's; checked where it is in use.

        Raises:
            TopologyError: It does not fit the method or the number of ranks.
        """
        by_hand = self.communication.by_hand(self.hand)
        if not any(value is not None for value in by_hand.values()):
            given = self.topology
            if given is None:
                given = self.communication.inherited(self.context)
            if given is not None and given is not self._accepted:
                self._accept(given)
        return None if self.topology is None else self._schedule

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
