"""Program that ``network-cost`` starts on every rank: times averages between the hosts."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

import asyncddp as bf
from asyncddp import topology
from benchmarks import baselines
from benchmarks.harness import measure
from benchmarks.network.cost.averages import ALLREDUCE, GLOO, GRAPHS, OURS, SOCKETS
from benchmarks.network.cost.socket_exchange import SocketMesh
from benchmarks.network.host_ranks import join_hosts
from benchmarks.run_header import facts_of_run
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, TimingTable

__all__ = ["main"]

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(answer[20:24])


def _alone(world: RankGroup, name: str, prepare: Callable[[int], Call]) -> Rival:
    """A rival whose calls begin when those before have ended on all ranks.

    The model is of such calls: beside a slow link the other ranks would else begin the next one
    early and take from the link what the slow rank still waits for. A table's lead, in which TCP
    finds its pace, is a whole period, so that the timed call is of each round in turn.
    """

    def finish(result: torch.Tensor) -> torch.Tensor:
        world.comm.Barrier()
        return result

    return Rival(name, prepare, finish)


def _neighbors_table(world: RankGroup, mesh: SocketMesh, name: str, nbytes: int) -> TimingTable:
    schedule = topology.as_schedule(GRAPHS[name](world.size))

    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce(own, round=number)

    sockets = partial(mesh.prepare, schedule)
    return TimingTable(
        name,
        f"{name} average",
        [nbytes],
        [_alone(world, OURS, ours), _alone(world, SOCKETS, sockets)],
        expected=partial(baselines.average, schedule, world.rank),
        begin=lambda: bf.set_topology(schedule),
        lead=schedule.period or 1,
    )


def _allreduce_table(world: RankGroup, nbytes: int) -> TimingTable:
    def ours(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        return lambda number: bf.allreduce(own)

    def gloo(nbytes: int) -> Call:
        if world.gloo is not None:
            raise RivalUnavailableError(world.gloo)
        own = baselines.own(nbytes, world.rank)

        def call(number: int) -> torch.Tensor:
            del number
            result = own.clone()
            torch.distributed.all_reduce(result)
            return result.div_(world.size)

        return call

    def expected(nbytes: int) -> torch.Tensor:
        return baselines.tensor(nbytes, 0) * ((world.size + 1) / 2)

    rivals = [_alone(world, OURS, ours), _alone(world, GLOO, gloo)]
    return TimingTable(ALLREDUCE, "average of all", [nbytes], rivals, expected=expected, lead=1)


@click.command()
@click.option("--nbytes", type=int, required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--interface", default="e0")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(nbytes: int, rounds: int, interface: str, out: Path) -> None:
    """Measure on this run's ranks; rank 0 writes what was found."""
    torch.set_num_threads(1)
    bf.init()
    world = join_hosts(interface)
    mesh = SocketMesh(world, _address(interface))
    tables = [_neighbors_table(world, mesh, name, nbytes) for name in GRAPHS]
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for table in (*tables, _allreduce_table(world, nbytes)):
        found, reasons = measure(
            world, table, rounds=rounds, sample=0.0, advance=lambda nbytes: None
        )
        rows += [asdict(row) for row in found]
        missing |= {f"{table.title} by {rival}": why for rival, why in reasons.items()}
    facts = facts_of_run()
    if world.rank == 0:
        written = {"header": facts, "rows": rows, "missing": missing}
        out.write_text(json.dumps(written), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
