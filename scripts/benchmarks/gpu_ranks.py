"""What ``gpu`` starts on every rank: all tables of one wire."""

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
from benchmarks import raw
from benchmarks.contract import Table, World
from benchmarks.gpu_device import Device, chosen
from benchmarks.gpu_model import resnet50, step_table
from benchmarks.gpu_tables import MB, Bench, caller_table, mixing_table, piece_table
from benchmarks.gpu_ways import ways_sheet
from benchmarks.harness import measure
from benchmarks.machine import header
from benchmarks.own_facts import OF_ONE_RUN
from benchmarks.sheets import Carried, as_sheet

_KB = 1024
_SIZES = tuple(64 * _KB * 4**power for power in range(8))  # 64 KB … 1 GB
_QUICK = (64 * _KB, MB, 64 * MB)
_PRETENDED = (64 * _KB, MB)
_BUFFERS = 20  # of the largest size that a rank's rivals hold on the device, all in all


def _tables(
    world: World, device: Device, wire: str, *, quick: bool, pretend: bool
) -> Sequence[Table]:
    bench = Bench(world, device)
    sizes = _PRETENDED if pretend else _QUICK if quick else _SIZES
    fitting = [size for size in sizes if _BUFFERS * size * world.size <= device.memory]
    tables = [
        mixing_table(bench, wire, fitting),
        caller_table(bench, wire, [size for size in fitting if size <= 64 * MB]),
    ]
    if wire == "cuda_staged":
        tables.append(piece_table(bench, fitting[-1:] if quick else fitting[-3:]))
    workload = resnet50(16 if quick else 64)
    if pretend:
        workload = resnet50(2, channels=4, side=32, classes=10)
    return [*tables, step_table(bench, wire, workload)]


@click.command()
@click.option("--wire", required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--quick", is_flag=True)
@click.option("--stand-in", "pretend", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(wire: str, rounds: int, quick: bool, pretend: bool, out: Path) -> None:
    """Measure a wire; rank 0 writes what was found."""
    with ExitStack() as stack:
        device = stack.enter_context(chosen(pretend=pretend))
        bf.init()
        found = _found(device, wire, rounds, quick=quick, pretend=pretend)
        if bf.rank() == 0:
            out.write_text(json.dumps(found), encoding="utf-8")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _found(device: Device, wire: str, rounds: int, *, quick: bool, pretend: bool) -> dict[str, Any]:
    world = raw.join()
    used = world.comm.allgather(device.wire())
    facts = {key: value for key, value in header(world).items() if key not in OF_ONE_RUN}
    found: dict[str, Any] = {"header": {**facts, **device.facts()}, "sheets": [], "rows": []}
    found["missing"] = []
    if set(used) != {wire}:
        why = f"{world.size} ranks agree on {' and '.join(sorted(set(used)))}: see asyncddp doctor"
        found["missing"].append(f"{wire} was not measured: {why}")
        return found
    for table in _tables(world, device, wire, quick=quick, pretend=pretend):
        rows, missing = measure(
            world,
            table,
            rounds=rounds,
            sample=0.0001 if pretend else 0.001 if quick else 0.01,
            advance=partial(_say, world, table),
        )
        found["sheets"].append(asdict(as_sheet(table, rows)))
        found["rows"] += [asdict(row) for row in rows]
        found["missing"] += [
            f"{table.title}: {name} was not measured: {why}" for name, why in missing.items()
        ]
    if wire == "cuda_staged" and world.size == 2:
        if world.rank == 0:
            found["sheets"].append(asdict(_ways(device, rounds, quick=quick, pretend=pretend)))
        world.comm.Barrier()
    return found


def _ways(device: Device, rounds: int, *, quick: bool, pretend: bool) -> Carried:
    sizes = [64 * _KB] if pretend else [64 * MB] if quick else [64 * MB, 256 * MB]
    return ways_sheet(device, sizes, [2] if quick or pretend else [2, 4, 8], rounds)


def _say(world: World, table: Table, nbytes: int) -> None:
    if world.rank == 0:
        click.echo(f"{table.title}, {nbytes:,} B")


if __name__ == "__main__":
    main()
