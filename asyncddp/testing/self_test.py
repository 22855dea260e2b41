"""Self-test of an installation: calls every operation once on all ranks, and checks the results.

``asyncddp doctor --check`` starts ``python -m asyncddp.testing.self_test`` on two ranks for each
transport and reports which of them work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.cli.doctor.mpi_probe import print_answer
from asyncddp.errors import EnvironmentProblem
from asyncddp.ops.object_collectives import gather_records
from asyncddp.testing.oracle import oracle

_COUNTS = {"cpu": (6, 200_003), "cuda": (6, 2_500_003)}
"""Elements for each kind of device: in one message, and in several pieces."""

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class SelfTestData:
    r"""Input tensors of an installation's self-test, and their expected results.

    Rank r holds ``count`` elements :math:`x_r = (r + 1)\, b`; b repeats the quarters from −4 to 4.
    """

    rank: int
    size: int
    count: int
    device: torch.device

    def of(self, rank: int) -> torch.Tensor:
        """Return a rank's input in float64, on the host."""
        numbers = torch.arange(self.count, dtype=torch.float64, device="cpu")
        return (rank + 1) * (numbers % 33 - 16) / 4

    def own(self) -> torch.Tensor:
        """Return this rank's input in float32, on its device."""
        return self.of(self.rank).to(self.device, torch.float32)

    def average(self, ranks: Sequence[int] | None = None) -> torch.Tensor:
        """Average the inputs of the given ranks, by default of all."""
        chosen = range(self.size) if ranks is None else ranks
        return torch.stack([self.of(rank) for rank in chosen]).mean(dim=0)

    def joined(self, ranks: Sequence[int]) -> torch.Tensor:
        """Concatenate the inputs of the given ranks."""
        return torch.cat([self.of(rank) for rank in ranks])

    def mixed(self, of: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Compute the expected weighted average with the ring's neighbours."""
        return oracle(topology.ring(self.size), self.rank, of or self.of)


Pair = tuple[torch.Tensor, torch.Tensor]
"""Actual and expected result."""


def _reduce_scatter(data: SelfTestData) -> Iterator[Pair]:
    whole = data.average().repeat(data.size)
    part = whole.view(data.size, -1)[data.rank]
    yield bf.reduce_scatter(data.own().repeat(data.size)), part


def _scatter_and_gather(data: SelfTestData) -> Iterator[Pair]:
    last, rows = data.size - 1, data.own().repeat(data.size)
    part = bf.scatter(rows, last, out=torch.empty_like(data.own()))
    yield part, data.of(last)
    gathered = bf.gather(part, last)
    if gathered is not None:
        yield gathered, data.of(last).repeat(data.size)


def _groups(data: SelfTestData) -> Iterator[Pair]:
    everyone, others = bf.new_group(), bf.new_group(range(0, data.size, 2))
    yield bf.allreduce(data.own(), group=everyone), data.average()
    highest = torch.stack([data.of(rank) for rank in others.ranks]).amax(dim=0)
    if data.rank in others:
        yield bf.allreduce(data.own(), op="max", group=others), highest


def _send_and_recv(data: SelfTestData) -> Iterator[Pair]:
    if data.size > 1:
        before = (data.rank - 1) % data.size
        sent = bf.send_nonblocking(data.own(), (data.rank + 1) % data.size)
        yield bf.recv(data.own(), before), data.of(before)
        sent.wait()


def _reduce(data: SelfTestData) -> Iterator[Pair]:
    for root in range(data.size):
        average = bf.reduce(data.own(), root, "average")
        if average is not None:
            yield average, data.average()


def _neighbor_allgather(data: SelfTestData) -> Iterator[Pair]:
    if sources := bf.in_neighbor_ranks():
        yield bf.neighbor_allgather(data.own()), data.joined(sources)


def _pair_gossip(data: SelfTestData) -> Iterator[Pair]:
    partner = data.rank ^ 1
    if partner < data.size:  # an odd one out has none
        yield bf.pair_gossip(data.own(), partner), data.average([data.rank, partner])


def _hierarchical_neighbor_allreduce(data: SelfTestData) -> Iterator[Pair]:
    if not bf.is_homogeneous():
        return
    machines = bf.current().machines.members
    bf.set_machine_topology(topology.ring(len(machines)))
    twins = SelfTestData(bf.machine_rank(), len(machines), data.count, data.device)
    expected = twins.mixed(lambda machine: data.average(machines[machine]))
    yield bf.hierarchical_neighbor_allreduce(data.own()), expected


def _windows(data: SelfTestData) -> Iterator[Pair]:
    name = f"self-test {data.count}"
    bf.win_create(data.own(), name)
    bf.win_put(data.own(), name)
    bf.barrier()
    yield bf.win_update(name, clone=True), data.mixed()
    bf.barrier()
    bf.win_get(name)
    yield bf.win_update(name, clone=True), data.mixed()
    bf.barrier()
    bf.win_free(name)


def _training_step(data: SelfTestData) -> Iterator[Pair]:
    model = torch.nn.ParameterList([data.own()])  # whose gradient is to be 1 everywhere
    optimizer = bf.DistributedAdaptThenCombineOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model,
        topology=topology.ring(data.size),
        broadcast=False,
    )
    model[0].sum().backward()
    optimizer.step()
    yield model[0].detach(), data.mixed(lambda rank: data.of(rank) - 0.5)


CHECKS: Mapping[str, Callable[[SelfTestData], Iterable[Pair]]] = {
    "allreduce": lambda data: [(bf.allreduce(data.own()), data.average())],
    "allgather": lambda data: [(bf.allgather(data.own()), data.joined(range(data.size)))],
    "broadcast": lambda data: [(bf.broadcast(data.own(), data.size - 1), data.of(data.size - 1))],
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "alltoall": lambda data: [
        (bf.alltoall(data.own().repeat(data.size)), data.joined(range(data.size)))
    ],
    "scatter and gather": _scatter_and_gather,
    "send and recv": _send_and_recv,
    "groups": _groups,
    "neighbor_allreduce": lambda data: [(bf.neighbor_allreduce(data.own()), data.mixed())],
    "neighbor_allgather": _neighbor_allgather,
    "pair_gossip": _pair_gossip,
    "local_allreduce": lambda data: [
        (bf.local_allreduce(data.own()), data.average(bf.current().local_ranks))
    ],
    "hierarchical_neighbor_allreduce": _hierarchical_neighbor_allreduce,
    "windows": _windows,
    "training step": _training_step,
}
"""All checks, in the order in which they run; each is collective."""


def problems(device: torch.device) -> list[str]:
    """Run all checks on a device, and describe each wrong result on this rank; collective.

    Example:
        >>> import torch
        >>> with bf.local_world(3) as world:
        ...     world.run(problems, torch.device("cpu"))
        [[], [], []]
    """
    bf.set_topology(topology.ring(bf.size()))
    found = []
    for count in _COUNTS[device.type]:
        data = SelfTestData(bf.rank(), bf.size(), count, device)
        for name, check in CHECKS.items():
            for got, expected in check(data):
                if problem := _difference(got, expected, device):
                    found.append(f"{name} of {count} elements on rank {data.rank}: {problem}")
    return found


def _difference(got: torch.Tensor, expected: torch.Tensor, device: torch.device) -> str:
    """Describe the difference; empty if it is within rounding."""
    if got.shape != expected.shape or got.device.type != device.type:
        return (
            f"expected {tuple(expected.shape)} on {device.type}, "
            f"got {tuple(got.shape)} on {got.device.type}"
        )
    error = (got.to("cpu", torch.float64) - expected).abs()
    allowed = _TOLERANCE * max(1.0, float(expected.abs().max()))
    wrong = torch.nonzero(~(error <= allowed))  # a NaN is wrong, too
    if not len(wrong):
        return ""
    first = int(wrong[0])
    values = f"expected {expected[first]:g}, got {float(got[first]):g}"
    return f"{len(wrong)} wrong, the first at {first}: {values}"


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    index = bf.current().default_gpu
    if index is None:
        raise EnvironmentProblem(
            f"rank {bf.rank()} sees no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi there"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main(words: Sequence[str]) -> None:
    """Run the checks on this rank; rank 0 prints the results of all ranks."""
    if list(words) not in (["cpu"], ["cuda"]):
        sys.exit("usage: python -m asyncddp.testing.self_test cpu|cuda")
    bf.init()
    start = time.monotonic()
    found = gather_records(problems(_device(words[0])), list[str], "self-test")
    if bf.rank() == 0:
        choice = bf.current().device_choice
        answer = {
            "ranks": bf.size(),
            "checks": len(CHECKS),
            "problems": [problem for rank in found for problem in rank],
            "device_transport": choice.transport,
            "refused": dict(choice.refused),
            "failed": choice.failed,
            "seconds": time.monotonic() - start,
        }
        print_answer(answer)
    bf.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
