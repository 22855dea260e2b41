"""Topologies in use on one rank: static or time-varying, between ranks and between machines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from asyncddp import topology
from asyncddp.errors import ArgumentError
from asyncddp.membership import View
from asyncddp.rank_list_text import list_ranks
from asyncddp.topology import GraphOrSchedule as Topology
from asyncddp.topology.builders import TopologyLike, topology_for
from asyncddp.topology.checks import is_weighted
from asyncddp.topology.default_schedule import default_schedule
from asyncddp.topology.schedule import between_ranks, without_ranks

__all__ = ["Topologies", "Topology"]

logger = logging.getLogger("asyncddp")


class Topologies:
    """Communication topologies in use on one rank: between ranks, and between machines.

    Attributes:
        ranks: The topology between ranks, as a schedule.
        machine_given: The topology between machines as it was set; None before that.
        pinned: Names of windows, while there are any: they lie along the edges of the topology.
    """

    ranks: topology.Schedule
    _of_all: topology.Schedule  # also of ranks that have left
    view_at: Callable[[str, int], View] | None = None
    """Returns the view to which a round of a name belongs; None unless the run is elastic."""

    def __init__(self, size: int, machines: int, rank: int) -> None:
        self._size, self._machines, self._rank = size, machines, rank
        self._view: View | None = None
        self._of_views: dict[tuple[int, ...], topology.Schedule] = {}  # by their members
        self.pinned: set[str] = set()
        self._given: Topology | None = None
        self.set(None)
        self.machine_given: Topology | None = None
        self._machine_schedule: topology.Schedule | None = None

    def set(self, given: TopologyLike | None) -> None:
        """Set the topology between ranks; None selects ``exponential_two``."""
        if self.pinned and (given is None or given is not self._given):
            names = ", ".join(map(repr, sorted(self.pinned)))
            raise topology.TopologyError(
                f"set_topology: the windows {names} lie along the edges of the topology in use; "
                "call win_free() on all ranks before setting another"
            )
        if given is None:
            self._of_all, self._given = default_schedule(self._size), None
        else:
            chosen = topology_for(given, self._size)
            self._of_all = self._checked_schedule(chosen, self._size, "ranks")
            self._given = chosen
        self._source = given
        self._of_views.clear()
        self.ranks = self.of_view(self._view)

    def enter(self, view: View) -> None:
        """Use the topology of a new view; rounds that belong to an earlier one keep that one's."""
        self._view = view
        self.ranks = self.of_view(view)

    def of_round(self, name: str, number: int) -> topology.Schedule:
        """Return the topology of a round of a name."""
        return self.ranks if self.view_at is None else self.of_view(self.view_at(name, number))

    def of_view(self, view: View | None) -> topology.Schedule:
        """Return the topology of a view.

        It is drawn anew for the number of members if it was given by name or as a function, or not
        at all. A graph or schedule keeps its edges, as does one along which windows lie; weights
        of ranks that have left go to their neighbours' own.
        """
        if view is None or len(view.members) == self._size:
            return self._of_all
        schedule = self._of_views.get(view.members)
        if schedule is None:
            if self.pinned:
                schedule = without_ranks(self._of_all, self._others(view.members))
            else:
                source = default_schedule if self._source is None else self._source
                schedule = self.among(view.members, source)
            self._of_views[view.members] = schedule
        return schedule

    def _others(self, members: Sequence[int]) -> list[int]:
        return sorted(set(range(self._size)).difference(members))

    def among(self, members: Sequence[int], source: TopologyLike) -> topology.Schedule:
        """Return a topology of some ranks: drawn for them, or a graph without the others."""
        count = len(members)
        if callable(source) or isinstance(source, str):
            drawn = self._checked_schedule(topology_for(source, count), count, "members")
            return between_ranks(drawn, members, self._size)
        left = self._others(members)
        if self._rank == members[0]:
            logger.warning(
                "%s goes on without %s: their weights go to their neighbours' own, so that the "
                "other ranks may tend to a weighted average instead of the mean. Give the topology "
                "by name, or as a function of the number of ranks: then it is drawn anew",
                topology.describe(source),
                list_ranks(left),
            )
        return without_ranks(topology.as_schedule(source), left)

    @property
    def given(self) -> Topology:
        """Topology between ranks, as the user set it."""
        if self._given is None:
            self._given = topology.exponential_two(self._size)
        return self._given

    def set_machine(self, given: TopologyLike | None) -> None:
        """Set the topology between machines; None selects ``exponential_two``."""
        chosen = topology_for("exponential_two" if given is None else given, self._machines)
        self._machine_schedule = self._checked_schedule(chosen, self._machines, "machines")
        self.machine_given = chosen

    @property
    def machines(self) -> topology.Schedule:
        """Topology between machines, as a schedule."""
        if self._machine_schedule is None:
            raise ArgumentError(
                "no topology between machines is set: call set_machine_topology(...), for example "
                f"with topology.exponential_two({self._machines})"
            )
        return self._machine_schedule

    def _checked_schedule(self, given: Topology, size: int, what: str) -> topology.Schedule:
        schedule = topology.as_schedule(given)
        if schedule.n != size:
            raise topology.TopologyError(
                f"topology {topology.describe(given)} is for {schedule.n} {what}, but there are "
                f"{size}: build it with n={size}"
            )
        uniform = not isinstance(given, topology.Schedule) and not is_weighted(given)
        if self._rank == 0 and uniform and not topology.is_doubly_stochastic(schedule):
            logger.warning(
                "%s has no weights, so every rank averages uniformly over itself and its "
                "in-neighbours; as their numbers differ, ranks tend to a weighted average instead "
                "of the mean. topology.metropolis_weights(graph) keeps the mean where all edges go "
                "both ways",
                schedule.name,
            )
        return schedule
