"""Checks that an algorithm, graph and scenario can be simulated; errors explain why not."""

from __future__ import annotations

import numpy as np

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import (
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.algorithms.model_averager import communication_for
from asyncddp.errors import ArgumentError
from asyncddp.optim.distributed_optimizer_arguments import checked_flag, checked_staleness
from asyncddp.optim.method_settings import MethodSettings
from asyncddp.simulate.averaging import (
    AveragingScheme,
    GlobalAveraging,
    NeighborAveraging,
    NoAveraging,
    PushSumAveraging,
)
from asyncddp.simulate.machine_averaging import (
    HierarchicalAveraging,
    LeaderAveraging,
    MachineAveraging,
)
from asyncddp.simulate.scenario import Mask, Scenario
from asyncddp.topology import (
    GraphOrSchedule,
    Schedule,
    TopologyError,
    as_schedule,
    describe,
    exponential_two,
)
from asyncddp.topology.builders import topology_for
from asyncddp.topology.schedule import between_ranks, without_ranks

_AVERAGINGS: dict[str, type[AveragingScheme]] = {
    "allreduce": GlobalAveraging,
    "empty": NoAveraging,
    "hierarchical_allreduce": HierarchicalAveraging,
    "hierarchical_neighbor_allreduce": MachineAveraging,
    "neighbor_allreduce": NeighborAveraging,
    "pair_average": NeighborAveraging,
    "win_accumulate": PushSumAveraging,
    "win_get": NeighborAveraging,
    "win_put": NeighborAveraging,
}
"""Averaging by the name of the communication; that through windows is of ranks that meet."""
_AGAIN = "retransmit_after=0.2, after which what is lost is sent again"


def drawn_topology(settings: MethodSettings, method: Algorithm, nodes: int) -> GraphOrSchedule:
    """Return the topology for a number of nodes: as given, by name or function, or the default."""
    given = settings.topology
    chosen = method.default_topology(nodes) if given is None else topology_for(given, nodes)
    return exponential_two(nodes) if chosen is None else chosen


class ViewSchedules:
    """Topology schedules under churn: drawn for the present ranks, or with the others left out.

    Args:
        settings: The topology, and settings of the method.
        method: The method.
        scenario: Which ranks die or come, and whether a topology is drawn anew.
        ranks: Number of ranks.
        machines: Number of machines, if the topology is one of machines.
    """

    def __init__(
        self,
        settings: MethodSettings,
        method: Algorithm,
        scenario: Scenario,
        ranks: int,
        machines: int | None = None,
    ) -> None:
        self._settings, self._method = settings, method
        self._whole = method.schedule_along(checked_topology(settings, method, ranks, machines))
        given = settings.topology
        fixed = not (given is None or callable(given) or isinstance(given, str))
        self._redraw = scenario.redraw and not fixed

    def among(self, members: Mask) -> Schedule:
        """Return the schedule of a view."""
        here, n = np.flatnonzero(members).tolist(), len(members)
        if len(here) == n:
            return self._whole
        if not self._redraw:
            return without_ranks(self._whole, np.flatnonzero(~members).tolist())
        drawn = drawn_topology(self._settings, self._method, len(here))
        return between_ranks(self._method.schedule_along(drawn), here, n)


def checked_topology(
    settings: MethodSettings, method: Algorithm, ranks: int, machines: int | None = None
) -> GraphOrSchedule:
    """Return the given topology, or the method's default, after checking that it fits.

    It is one of machines where their number is given.

    Raises:
        TopologyError: It does not, or it has another number of nodes.
    """
    wanted = ranks if machines is None else machines
    chosen = drawn_topology(settings, method, wanted)
    nodes = as_schedule(chosen).n
    if nodes != wanted:
        on = "" if machines is None else f" on {machines} machines"
        raise TopologyError(
            f"argument topology: {describe(chosen)} has {nodes} nodes, but the problem has data of "
            f"{ranks} ranks{on}; build it with n={wanted}"
        )
    if not checked_flag("force", settings.force):
        method.check(chosen)
    return chosen


def averaging_of(
    settings: MethodSettings, method: Algorithm, scenario: Scenario, ranks: int
) -> type[AveragingScheme]:
    """Return the averaging scheme of a method, if it can be simulated.

    Raises:
        ArgumentError: It cannot; the message says why, and what can.
    """
    _refuse_timing(settings, "update_in_backward", "window_prefix", "autotune", "max_staleness")
    if method.when is CommunicationTiming.INTERVAL:
        raise ArgumentError(
            f"argument algorithm: {method.name} averages by the clock ({method.when.value}), and a "
            "simulation by steps; expected it without sync_interval_ms"
        )
    communication = communication_for(method, settings.communication).name
    if communication not in _AVERAGINGS:
        raise ArgumentError(
            f"argument communication: {communication} is not simulated; expected one of "
            f"{', '.join(_AVERAGINGS)}"
        )
    kind = _AVERAGINGS[communication]
    if kind is MachineAveraging:
        _check_machines(scenario, ranks)
        if method.compression is CompressionUse.DIFFERENCES:
            kind = LeaderAveraging
    if scenario.loses_messages:
        _check_loss(method, kind, compressed=settings.compressor_for(method) is not None)
    if scenario.loses_ranks and kind is HierarchicalAveraging:
        raise ArgumentError(
            f"Scenario: argument {scenario.loses_ranks}: {communication} needs all ranks of each "
            "machine, within join on real ranks too; expected communication='allreduce', and no "
            "hierarchical=True"
        )
    return kind


def _machine_count(scenario: Scenario, ranks: int) -> int:
    local = scenario.ranks_per_machine
    if ranks % local:
        raise ArgumentError(
            f"Scenario: argument links: {ranks} ranks are no whole number of machines with "
            f"ranks_per_machine={local}; expected a divisor"
        )
    return ranks // local


def _check_machines(scenario: Scenario, ranks: int) -> None:
    _machine_count(scenario, ranks)
    if scenario.loses_messages or scenario.loses_ranks:
        name, joins, again = scenario.loses_ranks, ", within join on real ranks too", ""
        if scenario.loses_messages:
            name, joins, again = "loss", "", f", or {_AGAIN}"
        raise ArgumentError(
            f"Scenario: argument {name}: averages inside machines need all their ranks{joins}; "
            f"expected communication='neighbor_allreduce'{again}"
        )


def asynchronous_communication(settings: MethodSettings, method: Algorithm) -> str | None:
    """Return the communication of an asynchronous method; None for other methods."""
    if method.when is CommunicationTiming.INTERVAL:
        return None  # which is refused
    chosen = communication_for(method, settings.communication)
    return chosen.name if chosen.asynchronous else None


def check_asynchronous(
    settings: MethodSettings,
    method: Algorithm,
    communication: str,
    scenario: Scenario,
) -> None:
    """Raise an ArgumentError for settings that asynchronous simulations do not support."""
    _refuse_timing(settings, "update_in_backward", "window_prefix", "autotune")
    settings.compressor_for(method)  # which refuses any
    bound = checked_staleness(settings.max_staleness, method)
    if scenario.arrivals:
        raise ArgumentError(
            "Scenario: argument arrivals: expected none with asynchronous=True, where windows of "
            f"{method.name} keep the edges of the start; expected asynchronous=False"
        )
    if scenario.loses_messages and (bound is not None or communication == "pair_average"):
        raise ArgumentError(
            f"Scenario: argument loss: {method.name} waits for what is lost, or keeps a sum by it; "
            f"expected {_AGAIN}, or a method that does neither, such as 'win_put' without a bound"
        )


def _refuse_timing(settings: MethodSettings, *names: str) -> None:
    for name in names:
        if getattr(settings, name):
            raise ArgumentError(
                f"argument {name}: it changes when real ranks send, not what they compute; leave "
                "it out of a simulation"
            )


def _check_loss(method: Algorithm, kind: type[AveragingScheme], *, compressed: bool) -> None:
    if method.compression is CompressionUse.DIFFERENCES:
        raise ArgumentError(
            f"Scenario: argument loss: what a rank of {method.name} has sent counts as known to "
            "its neighbours, which a message that is missing makes wrong for good; expected "
            f"another method, such as 'adapt_then_combine', or {_AGAIN}"
        )
    if issubclass(kind, GlobalAveraging):
        raise ArgumentError(
            f"Scenario: argument loss: {method.name} averages over all ranks"
            f"{' by compressed parts' if compressed else ''}, which fails as a whole if anything "
            f"is missing; expected a method that averages with neighbours, or {_AGAIN}"
        )
