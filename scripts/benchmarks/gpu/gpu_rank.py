"""Program that ``gpu`` starts on every rank: all tables of one transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

import asyncddp as bf
from benchmarks import baselines
from benchmarks.gpu.device import Device, open_device
from benchmarks.gpu.resnet_step import resnet50, step_table
from benchmarks.gpu.verb_tables import MB, GpuTableSetup, caller_table, mixing_table, piece_table
from benchmarks.gpu.weighted_sum_table import weighted_sum_table
from benchmarks.harness import measure
from benchmarks.json_tables import JsonTable, to_json_table
from benchmarks.machine_info import header
from benchmarks.run_header import OF_ONE_RUN
from benchmarks.tables import RankGroup, TimingTable

_KB = 1024
_SIZES = tuple(64 * _KB * 4**power for power in range(8))  # 64 KB … 1 GB
_QUICK = (64 * _KB, MB, 64 * MB)
_PRETENDED = (64 * _KB, MB)
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
    return [*tables, step_table(setup, transport, workload)]


@click.command()
@click.option("--transport", required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--quick", is_flag=True)
@click.option("--stand-in", "pretend", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(transport: str, rounds: int, quick: bool, pretend: bool, out: Path) -> None:
    """Measure a transport; rank 0 writes what was found."""
    with ExitStack() as stack:
        device = stack.enter_context(open_device(pretend=pretend))
        found = _found(device, transport, rounds, quick=quick, pretend=pretend)
        if bf.rank() == 0:
            out.write_text(json.dumps(found), encoding="utf-8")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _found(
    device: Device, transport: str, rounds: int, *, quick: bool, pretend: bool
) -> dict[str, Any]:
    world = baselines.join()
    used = world.comm.allgather(device.transport())
    facts = {key: value for key, value in header(world).items() if key not in OF_ONE_RUN}
    found: dict[str, Any] = {"header": {**facts, **device.facts()}, "sheets": [], "rows": []}
    found["missing"] = []
    if set(used) != {transport}:
        why = f"{world.size} ranks agree on {' and '.join(sorted(set(used)))}: see asyncddp doctor"
        found["missing"].append(f"{transport} was not measured: {why}")
        return found
    for table in _tables(world, device, transport, quick=quick, pretend=pretend):
        rows, missing = measure(
            world,
            table,
            rounds=rounds,
            sample=0.0001 if pretend else 0.001 if quick else 0.01,
            advance=partial(_say, world, table),
        )
        found["sheets"].append(asdict(to_json_table(table, rows)))
        found["rows"] += [asdict(row) for row in rows]
        found["missing"] += [
            f"{table.title}: {name} was not measured: {why}" for name, why in missing.items()
        ]
    if transport == "cuda_staged" and world.size == 2:
        if world.rank == 0:
            found["sheets"].append(asdict(_ways(device, rounds, quick=quick, pretend=pretend)))
        world.comm.Barrier()
    return found


def _ways(device: Device, rounds: int, *, quick: bool, pretend: bool) -> JsonTable:
    sizes = [64 * _KB] if pretend else [64 * MB] if quick else [64 * MB, 256 * MB]
    return weighted_sum_table(device, sizes, [2] if quick or pretend else [2, 4, 8], rounds)


def _say(world: RankGroup, table: TimingTable, nbytes: int) -> None:
    if world.rank == 0:
        click.echo(f"{table.title}, {nbytes:,} B")


if __name__ == "__main__":
    main()
