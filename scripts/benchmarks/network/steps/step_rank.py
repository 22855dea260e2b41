"""Work of ``network-steps`` on every host: times the methods and counts their bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import asyncddp as bf
from asyncddp import topology
from benchmarks import baselines
from benchmarks.baselines import CHANGE, rival
from benchmarks.harness import measure as measure_table
from benchmarks.machine_info import facts_of_run
from benchmarks.network.hosts import transmitted, wait_until_quiet
from benchmarks.network.steps.synthetic_model import (
    ATC,
    ATC_BACKWARD,
    AWC,
    CENTRAL,
    DDP,
    GLOO_SUM,
    LOCAL,
    MPI_AFTER,
    MPI_SUM,
    OUR_MIX,
    OUR_SUM,
    SyntheticWorkload,
)
from benchmarks.tables import RankGroup, TimingTable
from benchmarks.training_step import Method, TrainingSetup, ddp, ours, step_table


def _mpi_after(training: TrainingSetup, world: RankGroup) -> None:
    """Lay all gradients into one tensor, so that one Allreduce averages them before each step."""
    parameters = list(training.model.parameters())
    flat, place = torch.zeros(sum(parameter.numel() for parameter in parameters)), 0
    for parameter in parameters:
        parameter.grad = flat[place : place + parameter.numel()].view_as(parameter)
        place += parameter.numel()

    def average(*_: object) -> None:
        _mpi_sum(world, flat, 0)

    training.optimizer.register_step_pre_hook(average)
    training.keeps_gradients = True


def _mpi_sum(world: RankGroup, own: torch.Tensor, number: int) -> torch.Tensor:
    world.comm.Allreduce(MPI.IN_PLACE, own.numpy(), MPI.SUM)
    return own.div_(world.size)


class _Methods:
    """All methods on the ranks of this run, each with its own model.

    Args:
        world: The ranks.
        workload: What each computes.
    """

    def __init__(self, world: RankGroup, workload: SyntheticWorkload) -> None:
        self._world, self._workload = world, workload
        self._made: dict[str, TrainingSetup] = {}
        self._schedule = topology.one_peer_exponential(world.size)

    def training(self) -> TimingTable:
        """A step of every method, over a single size: the model's."""
        world, cap = self._world, self._workload.bucket_mb
        sized = partial(ours, bucket_size_in_mb=cap)
        one_peer = partial(sized, graph=self._schedule)
        atc = partial(one_peer, algorithm="adapt_then_combine")
        methods: dict[str, Method] = {
            LOCAL: lambda training: None,
            DDP: partial(ddp, world=world, bucket_cap_mb=cap),
            MPI_AFTER: partial(_mpi_after, world=world),
            CENTRAL: partial(sized, algorithm="gradient_allreduce"),
            AWC: partial(one_peer, algorithm="adapt_with_combine"),
            ATC: atc,
            ATC_BACKWARD: partial(atc, update_in_backward=True),
        }

        def kept(name: str, training: TrainingSetup) -> None:
            methods[name](training)
            self._made[name] = training

        named = {name: partial(kept, name) for name in methods}
        title = "a step over the network"
        table = step_table(world, self._workload.model(), named, "network", title)
        return replace(table, lead=0, samples=None)

    def alone(self) -> TimingTable:
        """The communication of the methods without any computing, on one flat tensor."""
        bf.set_topology(self._schedule)
        world = self._world
        rivals = [
            rival(world, GLOO_SUM, self._gloo_sum, CHANGE, gloo=True),
            rival(world, MPI_SUM, partial(_mpi_sum, world), CHANGE),
            rival(world, OUR_SUM, lambda own, k: bf.allreduce_(own), CHANGE),
            rival(world, OUR_MIX, lambda own, k: bf.neighbor_allreduce_(own, round=k), CHANGE),
        ]
        return TimingTable("network_alone", "communication alone", [self._workload.nbytes], rivals)

    def _gloo_sum(self, own: torch.Tensor, number: int) -> torch.Tensor:
        torch.distributed.all_reduce(own)
        return own.div_(self._world.size)

    def bytes_of(self, interface: str, steps: int) -> dict[str, dict[str, float]]:
        """Bytes per step of every method, of the host that sends most, by each counter.

        Acknowledgements and the barriers around the steps are in.
        """
        found: dict[str, dict[str, float]] = {}
        for name, training in self._made.items():
            readings = []
            for count in (0, steps):
                for number in range(count):
                    training.step(number)
                wait_until_quiet(self._world)
                readings.append(_sent(interface))
                if isinstance(training.optimizer, bf.DistributedOptimizer):
                    readings[-1]["payload"] = training.optimizer.bytes_sent
            before, after = readings
            mine = {key: (after[key] - before[key]) / steps for key in after}
            every = self._world.comm.allgather(mine)
            found[name] = {key: max(one[key] for one in every) for key in mine}
        return found


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


def measure(
    workload: dict[str, Any], rounds: int, steps: int, interface: str = "e0"
) -> dict[str, Any]:
    """Measure on this run's ranks.

    Args:
        workload: Of each rank.
        rounds: Of each method.
        steps: Over which bytes are counted.
        interface: Between the hosts.
    """
    torch.set_num_threads(1)
    bf.init()
    world = baselines.join(interface)
    methods = _Methods(world, SyntheticWorkload(**workload))
    facts = facts_of_run(world)
    world.say("steps")
    rows, missing = measure_table(world, methods.training(), rounds=rounds)
    world.say("bytes")
    sent = methods.bytes_of(interface, steps)
    world.say("communication alone")
    more, _ = measure_table(world, methods.alone(), rounds=max(2, rounds // 3))
    timed = [asdict(row) for row in rows + more]
    return {"header": facts, "rows": timed, "missing": missing, "sent": sent}
