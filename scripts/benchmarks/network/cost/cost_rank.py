"""Work of ``network-cost`` on every rank: times averages between the hosts."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import asyncddp as bf
from asyncddp import topology
from benchmarks import baselines
from benchmarks.baselines import over, rival
from benchmarks.harness import measure as measure_table
from benchmarks.machine_info import facts_of_run
from benchmarks.mixing import average
from benchmarks.network.cost.averages import ALLREDUCE, GLOO, GRAPHS, OURS, SOCKETS
from benchmarks.network.cost.socket_exchange import SocketMesh
from benchmarks.tables import RankGroup, Rival, TimingTable

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(answer[20:24])


def _tables(world: RankGroup, mesh: SocketMesh, nbytes: int) -> Iterator[TimingTable]:
    """Averages over graphs and of all ranks, whose calls begin when those before have ended.

    The model is of such calls: beside a slow link the other ranks would else begin the next one
    early and take from the link what the slow rank still waits for. A table's lead, in which TCP
    finds its pace, is a whole period, so that the timed call is of each round in turn.
    """

    def finish(result: torch.Tensor) -> torch.Tensor:
        world.comm.Barrier()
        return result

    def gloo(own: torch.Tensor, number: int) -> torch.Tensor:
        result = own.clone()
        torch.distributed.all_reduce(result)
        return result.div_(world.size)

    for name, graph in GRAPHS.items():
        schedule = topology.as_schedule(graph(world.size))
        rivals = [
            rival(world, OURS, average, finish=finish),
            Rival(SOCKETS, partial(mesh.prepare, schedule), finish),
        ]
        lead = schedule.period or 1
        shared = over(world, schedule)
        yield TimingTable(name, f"{name} average", [nbytes], rivals, lead=lead, **shared)
    rivals = [
        rival(world, OURS, lambda own, number: bf.allreduce(own), finish=finish),
        rival(world, GLOO, gloo, gloo=True, finish=finish),
    ]
    expected = partial(baselines.mean_of_all, world)
    yield TimingTable(ALLREDUCE, "average of all", [nbytes], rivals, expected=expected, lead=1)


def measure(nbytes: int, rounds: int, interface: str = "e0") -> dict[str, Any]:
    """Measure all averages of a tensor on this run's ranks."""
    torch.set_num_threads(1)
    bf.init()
    world = baselines.join(interface)
    mesh = SocketMesh(world, _address(interface))
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for table in _tables(world, mesh, nbytes):
        found, reasons = measure_table(world, table, rounds=rounds)
        rows += [asdict(row) for row in found]
        missing |= {f"{table.title} by {rival}": why for rival, why in reasons.items()}
    return {"header": facts_of_run(world), "rows": rows, "missing": missing}
