"""Work of ``gpu`` on every rank: all tables of one transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import baselines
from benchmarks.gpu.device import Device, open_device
from benchmarks.gpu.verb_tables import (
    GpuTableSetup,
    caller_table,
    gpu_step_table,
    mixing_table,
    piece_table,
)
from benchmarks.gpu.weighted_sums import weighted_sum_table
from benchmarks.harness import measure as measure_table
from benchmarks.machine_info import facts_of_run
from benchmarks.report import as_figures
from benchmarks.tables import KB, MB, FigureTable, RankGroup, TimingRow, TimingTable
from benchmarks.training_models import resnet50

_SIZES = tuple(64 * KB * 4**power for power in range(8))  # 64 KB … 1 GB
_QUICK = (64 * KB, MB, 64 * MB)
_PRETENDED = (64 * KB, MB)
_BUFFERS = 20  # of the largest size that a rank's rivals hold on the device, all in all


def _tables(
    world: RankGroup, device: Device, transport: str, *, quick: bool, pretend: bool
) -> Sequence[TimingTable]:
    setup = GpuTableSetup(world, device)
    sizes = _PRETENDED if pretend else _QUICK if quick else _SIZES
    fitting = [size for size in sizes if _BUFFERS * size * world.size <= device.memory]
    tables = [
        mixing_table(setup, transport, fitting),
        caller_table(setup, transport, [size for size in fitting if size <= 64 * MB]),
    ]
    if transport == "cuda_staged":
        tables.append(piece_table(setup, fitting[-1:] if quick else fitting[-3:]))
    workload = resnet50(16 if quick else 64)
    if pretend:
        workload = resnet50(2, channels=4, side=32, classes=10)
    return [*tables, gpu_step_table(setup, transport, workload)]


def measure(transport: str, rounds: int, quick: bool, pretend: bool) -> dict[str, Any]:
    """Measure all tables of a transport on this run's ranks."""
    with open_device(pretend=pretend) as device:
        return _found(device, transport, rounds, quick=quick, pretend=pretend)


def _found(
    device: Device, transport: str, rounds: int, *, quick: bool, pretend: bool
) -> dict[str, Any]:
    world = baselines.join()
    used = set(world.comm.allgather(device.transport()))
    tables: list[FigureTable] = []
    rows: list[TimingRow] = []
    missing = []
    if used != {transport}:
        why = f"{world.size} ranks agree on {' and '.join(sorted(used))}: see asyncddp doctor"
        missing.append(f"{transport} was not measured: {why}")
    else:
        for table in _tables(world, device, transport, quick=quick, pretend=pretend):
            found, reasons = measure_table(
                world,
                table,
                rounds=rounds,
                sample=0.0001 if pretend else 0.001 if quick else 0.01,
                advance=lambda nbytes: world.say(f"{table.title}, {nbytes:,} B"),  # noqa: B023
            )
            tables.append(as_figures(table, found))
            rows += found
            for name, why in reasons.items():
                missing.append(f"{table.title}: {name} was not measured: {why}")
        if transport == "cuda_staged" and world.size == 2:
            if world.rank == 0:
                sizes = [64 * KB] if pretend else [64 * MB] if quick else [64 * MB, 256 * MB]
                neighbours = [2] if quick or pretend else [2, 4, 8]
                tables.append(weighted_sum_table(device.place, sizes, neighbours, rounds))
            world.comm.Barrier()
    return {
        "header": {**facts_of_run(world), **device.facts()},
        "tables": [asdict(one) for one in tables],
        "rows": [asdict(row) for row in rows],
        "missing": missing,
    }
