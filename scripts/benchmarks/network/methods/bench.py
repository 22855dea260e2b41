"""``network-methods``: methods and compressors on 4 and 8 hosts, over slow and long links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.network.hosts import HostNetwork, check_hosts, run_on_hosts
from benchmarks.network.methods.digits_training import BATCH, NBYTES
from benchmarks.network.methods.method_tables import (
    CURVE_COLUMNS,
    STRAGGLER_COLUMNS,
    MethodsMeasurement,
    bytes_lines,
    curve_lines,
    speed_lines,
    straggler_lines,
)
from benchmarks.network.methods.method_training import ASYNC, BYTEGRAD, DDP, GOSSIP, LOCAL
from benchmarks.ranks import Advance
from benchmarks.report import BenchFigures, BenchOptions
from benchmarks.tables import FigureTable, TimingRow, size_text

_HOSTS = (4, 8)
_RATES = ("100mbit", "1gbit", "unlimited")
_LATENCIES = (0.0, 0.020)
_QUICK = HostNetwork(2, "1gbit", 0.005)
_QUICK_METHODS = (LOCAL, DDP, BYTEGRAD, GOSSIP, ASYNC)
_COUNTED = tuple(HostNetwork(hosts, "1gbit") for hosts in _HOSTS)
_SLOW_RANK = HostNetwork(4, "1gbit")  # where the last rank is slow besides
_TRAINED = (HostNetwork(4, "100mbit"), HostNetwork(4, "100mbit", 0.020))
_SLOWER = 6.0
_ACCELERATOR = 0.030  # seconds of a step
_ROUNDS, _QUICK_ROUNDS = 30, 2
_LEARN_SECONDS, _QUICK_SECONDS = 20, 0.5
_SPEED_NOTE = (
    f"Hosts are network namespaces of this machine and share its cores. Each trains the same model "
    f"of {size_text(NBYTES)} on scikit-learn's digits, {BATCH} images a step, whose layers sleep "
    f"{1000 * _ACCELERATOR:.0f} ms a step: as an accelerator computes while the processor is free. "
    "All methods take turns, in buckets of one square layer, but for DDP's PowerSGD, which has a "
    "single one. Latency is added in each direction, to what the links take. Samples of all hosts "
    "per second over those of DDP on gloo; the last line is DDP's step."
)
_BYTES_NOTE = (
    "Of the host that sends most, by its interface's count, headers and acknowledgements included."
)
_SLOW_NOTE = (
    f"The last rank's layers sleep {_SLOWER:g} times as long. Steps are those of the slowest "
    "of the others; samples left: what all ranks make of what they made."
)
_CURVE_NOTE = (
    "From the same start; the mean accuracy of all ranks' own models on 450 images that nobody "
    "trains on, judged after the clock has stopped. Methods that wait make 60 steps, "
    "or 20 s of them."
)


def _measure(
    network: HostNetwork, rounds: int, advance: Advance, *, quick: bool
) -> MethodsMeasurement:
    """Let all methods take turns on hosts with such links, and train where it is asked."""
    given: dict[str, Any] = {"accelerator": _ACCELERATOR, "rounds": rounds, "slower": [1.0]}
    if network == _SLOW_RANK or quick:
        given["slower"].append(_SLOWER)
    if network in _TRAINED or quick:
        given["learn"] = _QUICK_SECONDS if quick else _LEARN_SECONDS
    if quick:
        given["names"] = _QUICK_METHODS
    place = f"{network.hosts} hosts, {network.rate}, {1000 * network.latency:.0f} ms"
    work = "network.methods.methods_rank:measure"
    found = run_on_hosts(network, work, given, lambda text: advance(f"{place}, {text}"))
    return MethodsMeasurement.read(network, found)


def _tables(found: Sequence[MethodsMeasurement]) -> Iterator[FigureTable]:
    note = _SPEED_NOTE
    for hosts in sorted({one.network.hosts for one in found}):
        here = [one for one in found if one.network.hosts == hosts]
        columns, lines = ("method", *(one.link for one in here)), list(speed_lines(here))
        title = f"samples per second ÷ DDP's, {hosts} hosts"
        yield FigureTable(f"methods_speed_{hosts}", title, columns, lines, note)
        note = ""
    near = [one for one in found if one.network == _QUICK or one.network in _COUNTED]
    columns = ("method", *(f"{one.network.hosts} hosts" for one in near))
    title = "bytes on the wire per step and host ÷ model"
    yield FigureTable("methods_bytes", title, columns, list(bytes_lines(near)), _BYTES_NOTE)
    for one in found:
        if one.slowness > 1:
            title = f"one rank {one.slowness:g} times slower, {one.place}"
            lines = list(straggler_lines(one))
            yield FigureTable("methods_slow", title, STRAGGLER_COLUMNS, lines, _SLOW_NOTE)
        if one.curves:
            key = f"methods_accuracy_{one.network.rate}_{1000 * one.network.latency:.0f}"
            title = f"time to an accuracy, {one.place}"
            yield FigureTable(key, title, CURVE_COLUMNS, list(curve_lines(one)), _CURVE_NOTE)


def figures(options: BenchOptions, advance: Advance) -> BenchFigures:
    """Everything that this bench shows.

    Raises:
        RunFailedError: Hosts cannot be made here, or a run on them failed.
    """
    from benchmarks.network.methods.methods_plot import draw

    check_hosts()
    quick = options.quick
    rounds = options.rounds or (_QUICK_ROUNDS if quick else _ROUNDS)
    networks = [
        HostNetwork(hosts, rate, latency)
        for hosts in _HOSTS
        for latency in _LATENCIES
        for rate in _RATES
    ]
    chosen = [_QUICK] if quick else networks
    found = [_measure(network, rounds, advance, quick=quick) for network in chosen]
    rows, missing = [], []
    for one in found:
        for turn in one.turns:
            table = f"methods, {one.place}, {turn.slower:g}"
            rows.append(TimingRow(table, turn.name, NBYTES, 1, turn.seconds))
        for method, why in one.missing.items():
            missing.append(f"{method}, {one.place}, was not measured: {why}")
    facts = {**found[0].facts, "rounds": rounds}
    return BenchFigures(facts, list(_tables(found)), lambda path: draw(path, found), rows, missing)
