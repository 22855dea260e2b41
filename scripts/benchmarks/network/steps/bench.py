"""``network-steps``: a training step on 2, 4 and 8 hosts, over links slower than computing."""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks.network.hosts import HostNetwork, check_hosts, run_on_hosts
from benchmarks.network.steps.step_tables import (
    BYTES_COLUMNS,
    STEP_COLUMNS,
    NetworkLink,
    NetworkMeasurement,
    byte_lines,
    step_lines,
)
from benchmarks.network.steps.synthetic_model import SyntheticWorkload
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureTable, TimingRow

_HOSTS = (2, 4, 8)
_LINKS = (
    NetworkLink("100 Mbit/s", "100mbit", 1e8, SyntheticWorkload(16, 256, 0.200, 8)),
    NetworkLink("1 Gbit/s", "1gbit", 1e9, SyntheticWorkload(16, 512, 0.070, 8)),
    NetworkLink("unlimited", "unlimited", None, SyntheticWorkload(16, 512, 0.020, 8)),
)
_QUICK = NetworkLink("1 Gbit/s", "1gbit", 1e9, SyntheticWorkload(16, 256, 0.020, 8))
_ROUNDS, _QUICK_ROUNDS = 30, 3
_STEPS = 4  # over which bytes are counted
_STEP_NOTE = (
    "Hosts are network namespaces of this machine and share its cores. So the model computes "
    "little (16 square linear layers, batch of 4) and waits for the rest, evenly over the "
    "layers, a third in forward: as an accelerator computes while the processor is free. "
    "Compute is the local step, of all hosts at once. DDP and ours cut the model into the same "
    "8 buckets. Communication alone: a blocking call on a tensor of the model's size. Overlap: "
    "1 - (step - compute) / communication alone."
)
_BYTES_NOTE = (
    "Of the host that sends most, per step. Own count: bytes_sent of the optimizer. Interface: "
    "tx_bytes of e0, with acknowledgements and nothing subtracted; a packet of up to 48 KB counts "
    "with one header, as it comes from the system to a card that cuts it up. With all headers: "
    "counted by the limiter of the rate, with 66 bytes on each 1448, as they go over a wire."
)


def _measure(count: int, link: NetworkLink, rounds: int, advance: Advance) -> NetworkMeasurement:
    """Run all methods on so many hosts."""
    read = run_on_hosts(
        HostNetwork(count, link.rate),
        "network.steps.step_rank:measure",
        {"workload": asdict(link.workload), "rounds": rounds, "steps": _STEPS},
        lambda text: advance(f"{count} hosts, {link.name}, {text}"),
    )
    rows = [TimingRow(**row) for row in read["rows"]]
    return NetworkMeasurement(count, link, rows, read["sent"], read["missing"], read["header"])


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows.

    Raises:
        RunFailedError: Hosts cannot be made here, or a run on them failed.
    """
    from benchmarks.network.steps.step_plot import draw

    check_hosts()
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    links, counts = ((_QUICK,), (2,)) if options.quick else (_LINKS, _HOSTS)
    found = [_measure(count, link, rounds, advance) for link in links for count in counts]
    tables, rows, missing = [], [], []
    for one in found:
        key = f"{one.hosts}_{one.link.rate}"
        note = f"{one.note} {_STEP_NOTE if one is found[0] else ''}"
        title, lines = f"a step, {one.place}", list(step_lines(one))
        tables.append(FigureTable(f"network_step_{key}", title, STEP_COLUMNS, lines, note))
        rows += [replace(row, table=f"{row.table}_{key}") for row in one.rows]
        for method, why in one.missing.items():
            missing.append(f"{method}, {one.place}, was not measured: {why}")
    lines = [line for one in found for line in byte_lines(one)]
    title = "bytes on the wire, per step and host"
    tables.append(FigureTable("network_bytes", title, BYTES_COLUMNS, lines, _BYTES_NOTE))
    facts = {**found[0].facts, "rounds": rounds}
    return BenchFigures(facts, tables, lambda path: draw(path, found), rows, missing)
