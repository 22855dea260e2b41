"""Checks that a method, graph and scenario can be simulated; errors explain why not."""

from __future__ import annotations

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.method_traits import (
    CommunicationPattern,
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
from asyncddp.simulate.scenario import Scenario
from asyncddp.topology import GraphOrSchedule, TopologyError, as_schedule, describe, exponential_two
from asyncddp.topology.builders import TopologyLike, topology_for

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


def built_topology(
    settings: MethodSettings,
    given: TopologyLike,
    scenario: Scenario,
    ranks: int,
) -> GraphOrSchedule | None:
    """Build the topology given as a function or a name, for the nodes of a method's graph.

    Nodes are ranks, or machines where the method averages between them.
    """
    how = communication_for(settings.create_method(), settings.communication).how
    if how is None or how is CommunicationPattern.GLOBAL:
        return None
    machines = how is CommunicationPattern.MACHINES
    return topology_for(given, _machine_count(scenario, ranks) if machines else ranks)


def checked_topology(
    settings: MethodSettings, method: Algorithm, ranks: int, machines: int | None = None
) -> GraphOrSchedule:
    """Return the given topology, or the method's default, after checking that it fits.

    It is one of machines where their number is given.

    Raises:
        TopologyError: It does not, or it has another number of nodes.
    """
    wanted = ranks if machines is None else machines
    chosen = None if settings.topology is None else topology_for(settings.topology, wanted)
    chosen = method.default_topology(wanted) if chosen is None else chosen
    chosen = exponential_two(wanted) if chosen is None else chosen
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
    if scenario.departures and kind is HierarchicalAveraging:
        raise ArgumentError(
            f"Scenario: argument departures: {communication} needs all ranks of each machine, "
            "within join on real ranks too; expected communication='allreduce', and no "
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
    if scenario.loses_messages or scenario.departures:
        name, joins, again = "departures", ", within join on real ranks too", ""
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
