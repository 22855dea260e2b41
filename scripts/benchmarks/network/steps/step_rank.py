"""Program that ``network`` starts on every host: times the methods and counts their bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

import asyncddp as bf
from benchmarks.harness import measure
from benchmarks.network.host_ranks import join_hosts, transmitted, wait_until_quiet
from benchmarks.network.steps.method_set import MethodSet
from benchmarks.network.steps.synthetic_model import SyntheticWorkload
from benchmarks.run_header import facts_of_run
from benchmarks.tables import RankGroup, TimingRow, TimingTable

__all__ = ["main"]


def _sent(interface: str) -> dict[str, int]:
    """Bytes that this host has sent: by the interface, and by the limiter of its rate.

    The interface counts a packet of many segments with one header, as it comes from the system; the
    limiter counts the headers of each segment, as they go over a wire. Nothing is subtracted.
    """
    found = {"interface": transmitted(interface)}
    tool = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "tc"
    ask = [tool, "-s", "-j", "qdisc", "show", "dev", interface]
    answer = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    limiters = [one for one in json.loads(answer) if one["kind"] == "tbf"]
    return {**found, "headers": limiters[0]["bytes"]} if limiters else found


def _bytes_of(methods: MethodSet, interface: str, steps: int) -> dict[str, dict[str, float]]:
    """Bytes per step of every method, of the host that sends most, by each counter.

    Acknowledgements and the barriers around the steps are in.
    """
    found: dict[str, dict[str, float]] = {}
    for name, step in methods.steps.items():
        readings = []
        for count in (0, steps):
            for _ in range(count):
                step()
            wait_until_quiet(methods.world)
            wrapper = methods.wrappers.get(name)
            ours = {"payload": wrapper.bytes_sent} if wrapper else {}
            readings.append({**_sent(interface), **ours})
        before, after = readings
        mine = {key: (after[key] - before[key]) / steps for key in after}
        every = methods.world.comm.allgather(mine)
        found[name] = {key: max(one[key] for one in every) for key in mine}
    return found


def _measured(
    world: RankGroup, table: TimingTable, rounds: int
) -> tuple[list[TimingRow], dict[str, str]]:
    return measure(world, table, rounds=rounds, sample=0.0, advance=lambda nbytes: None)


def _print_progress(text: str) -> None:
    click.echo(text)


def _ignore_progress(text: str) -> None:
    """Ignore progress, on all ranks but the first."""


@click.command()
@click.option("--layers", type=int, required=True)
@click.option("--width", type=int, required=True)
@click.option("--accelerator", type=float, required=True)
@click.option("--buckets", type=int, required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--steps", type=int, required=True, help="Steps over which bytes are counted.")
@click.option("--interface", default="e0")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(rounds: int, steps: int, interface: str, out: Path, **workload: Any) -> None:
    """Measure on this run's ranks; rank 0 writes what was found and says how far it is."""
    torch.set_num_threads(1)
    bf.init()
    world = join_hosts(interface)
    methods = MethodSet(world, SyntheticWorkload(**workload))
    say = _print_progress if world.rank == 0 else _ignore_progress
    facts = facts_of_run()
    say("steps")
    rows, missing = _measured(world, methods.training(), rounds)
    say("bytes")
    sent = _bytes_of(methods, interface, steps)
    say("communication alone")
    more, _ = _measured(world, methods.alone(), max(2, rounds // 3))
    if world.rank == 0:
        timed = [asdict(row) for row in rows + more]
        found = {"header": facts, "rows": timed, "missing": missing, "sent": sent}
        out.write_text(json.dumps(found), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
