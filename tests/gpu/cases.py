"""What ranks do with tensors on a device; the tests compare it with what the host gives."""

from __future__ import annotations

import torch

import asyncddp as bf
import topology
from asyncddp.context import current
from asyncddp.memory.streams import streams_of_device
from asyncddp.transport.cuda_staged import on_device
from tests.support.oracle import held, options

SHAPES = [(), (0,), (1,), (5,), (3, 4), (70_001,), (3_000_000,)]


def verbs():
    """Each verb that takes a tensor, with the arguments that it needs."""
    last = bf.size() - 1
    return {
        "neighbor_allreduce": bf.neighbor_allreduce,
        "neighbor_allreduce_": lambda x, **more: bf.neighbor_allreduce_(x.clone(), **more),
        "later": lambda x, **more: bf.neighbor_allreduce_nonblocking(x, **more).wait(),
        "pair_gossip": lambda x, **more: bf.pair_gossip(x, bf.rank() ^ 1, **more),
        "hierarchical": bf.hierarchical_neighbor_allreduce,
        "allreduce": bf.allreduce,
        "allreduce_": lambda x, **more: bf.allreduce_(x.clone(), **more),
        "broadcast": lambda x, **_: bf.broadcast(x, last),
        "allgather": lambda x, **_: bf.allgather(x.reshape(-1)),
        "reduce_scatter": lambda x, **more: bf.reduce_scatter(
            x.reshape(-1).repeat(bf.size()), **more
        ),
        "neighbor_allgather": lambda x, **_: bf.neighbor_allgather(x.reshape(-1)),
    }


def prepare():
    bf.set_topology(topology.ring(bf.size()))
    bf.set_machine_topology(topology.ring(bf.machine_size()))


def agrees_with_the_host(device, dtype):
    """Every verb and shape gives on the device what it gives on the host, within rounding."""
    prepare()
    for name, verb in verbs().items():
        for seed, shape in enumerate(SHAPES):
            x = held(bf.rank(), shape, dtype, seed)
            expected = verb(x, **options(dtype))
            got = verb(x.to(device), **options(dtype))
            assert got.device == device, name
            torch.testing.assert_close(got.cpu(), expected, msg=f"{name} of {shape}")


def races(device, slow):
    """Slow work before a verb makes its input, and slow work after it uses its result.

    The caller's stream is not the default one, the input is overwritten as soon as the verb is
    over, and its memory is given back for others to use.
    """
    prepare()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        for step in range(5):
            for name, verb in verbs().items():
                x = held(bf.rank(), (100_000,), torch.float32, step)
                expected = verb(x)
                late = torch.full((100_000,), float("nan"), device=device)
                slow()
                late.copy_(x, non_blocking=True)
                got = verb(late)
                late.fill_(float("nan"))
                del late
                spoilt = torch.full((100_000,), float("nan"), device=device)
                slow()
                torch.testing.assert_close((got + 0.0).cpu(), expected, msg=f"{name}, {step}")
                del spoilt


def trains(device, steps):
    """Weights after some steps of adapt-then-combine; equal on all devices within rounding."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    ).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = topology.one_peer_exponential(bf.size())
    optimizer = bf.DistributedAdaptThenCombineOptimizer(inner, model=model, topology=schedule)
    for step in range(steps):
        data = held(bf.rank(), (8, 1, 8, 8), torch.float32, step).to(device)
        labels = torch.arange(8, device=device) % 10
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def in_a_process(name, *args):
    """One of the cases above on the GPU of a rank that is a process."""
    device = torch.device("cuda", bf.local_rank() % torch.cuda.device_count())
    return globals()[name](device, *args)


def agreed_wire():
    """The wire that serves this rank's GPU."""
    device = torch.device("cuda", bf.local_rank() % torch.cuda.device_count())
    return on_device(current().transport, streams_of_device(device)).name
