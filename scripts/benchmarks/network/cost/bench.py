"""``network-cost``: averages between hosts, beside what ``topology.communication_cost`` says."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.network.cost.averages import COLUMNS, CostMeasurement
from benchmarks.network.hosts import HostNetwork, check_hosts, run_on_hosts
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureTable

NETWORKS = (
    HostNetwork(4, "100mbit"),
    HostNetwork(4, "100mbit", latency=0.02),
    HostNetwork(4, "100mbit", latency=0.02, keeps_window=True),
    HostNetwork(4, "100mbit", slow_rate="25mbit"),
    HostNetwork(2, "100mbit", ranks_per_host=2),
    HostNetwork(2, "100mbit"),
    HostNetwork(8, "100mbit"),
    HostNetwork(4, "1gbit"),
)
_NBYTES = 1 << 22
_ROUNDS, _QUICK_ROUNDS = 30, 3
_NOTE = (
    "Blocking calls on a tensor of 4 MB: medians, of one peer the mean of its rounds' medians. "
    "Predicted: topology.communication_cost with the links as they are set up, of gloo's allreduce "
    "that of a ring, of ours that of a hierarchy. A call begins when that before has ended on all "
    "hosts. Judged are those who add least of their own: plain sockets, and gloo's. Latency is "
    "that of a program in place of the hosts' bridge, where the kernel has no netem; Linux's TCP "
    "begins slowly again after a pause, of which the model knows nothing, but where its window is "
    "kept (net.ipv4.tcp_slow_start_after_idle=0). The slow link is the last host's."
)


def measure(network: HostNetwork, nbytes: int, rounds: int, advance: Advance) -> CostMeasurement:
    """Measure all averages on some hosts.

    Raises:
        RunFailedError: The hosts cannot be made, or the run failed.
    """
    given = {"nbytes": nbytes, "rounds": rounds}
    found = run_on_hosts(network, "network.cost.cost_rank:measure", given, advance)
    return CostMeasurement.read(network, found)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows.

    Raises:
        RunFailedError: Hosts cannot be made here, or a run on them failed.
    """
    from benchmarks.network.cost.cost_plot import draw

    check_hosts()
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    found = []
    for network in NETWORKS[:1] if options.quick else NETWORKS:
        advance(f"{network.hosts} hosts, {network.rate}")
        found.append(measure(network, _NBYTES, rounds, advance))
    lines, rows, missing = [], [], []
    for one in found:
        lines += one.lines()
        rows += [replace(row, table=f"{row.table}, {one.place}") for row in one.rows]
        for what, why in one.missing.items():
            missing.append(f"{what}, {one.place}, was not measured: {why}")
    title = "averages between hosts, and what topology.communication_cost predicts"
    table = FigureTable("network_cost", title, COLUMNS, lines, _NOTE)
    facts = {**found[0].facts, "rounds": rounds}
    return BenchFigures(facts, [table], lambda path: draw(path, found), rows, missing)
