"""What a user has set as torch's default device concerns the user's tensors, not the library's.

The default is ``meta`` here, whose tensors have no values: whatever the library makes there by
mistake is an error at once, as a tensor of a GPU among those of the host is.
"""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.gpu.cases import prepare, verbs
from tests.support import on
from tests.support.oracle import held, options
from tests.support.staged import StagedWorld

SETTINGS = {"ranks_per_machine": 1}
SHAPES = [(), (0,), (5,), (70_001,)]


def every_verb(dtype):
    prepare()
    for name, verb in verbs().items():
        for shape in SHAPES:
            x = held(bf.rank(), shape, dtype)
            known = verb(x, **options(dtype))
            with torch.device("meta"):
                got = verb(x, **options(dtype))
            assert torch.equal(got, known), f"{name} of {shape}"


@on("loopback-2", "mpi-2", "shared_memory-2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_every_verb(world, dtype):
    """Under another default device each verb of host tensors gives the same result."""
    world.run(every_verb, dtype, settings=SETTINGS)


def test_every_verb_of_tensors_on_a_device():
    """Under another default device each verb of tensors on a device gives the same result."""
    StagedWorld(2).run(every_verb, torch.bfloat16, settings=SETTINGS)


def objects_and_shared_memory():
    with torch.device("meta"):
        assert bf.broadcast_object({"lr": 0.1} if bf.rank() == 0 else None) == {"lr": 0.1}
        assert bf.allgather_object(bf.rank()) == [0, 1]
        assert bf.empty_shared((3,), dtype=torch.float32).device.type == "cpu"


@on("loopback-2", "shared_memory-2")
def test_objects_and_shared_memory(world):
    """Under another default device object verbs work, and shared tensors are on the host."""
    world.run(objects_and_shared_memory)


def trained(algorithm, default):
    """Parameters after three steps,."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    start = held(0, (23,), torch.float32)
    torch.nn.utils.vector_to_parameters(start, model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [held(bf.rank(), (5, 4), torch.float32, seed=step) for step in range(3)]
    with torch.device(default):
        graph = topology.one_peer_exponential(bf.size())
        given = {} if algorithm == "gradient_allreduce" else {"topology": graph}
        optimizer = bf.DistributedOptimizer(inner, model, algorithm, **given)
        for inputs in data:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        distance = bf.consensus_distance(model)
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), distance


@on("loopback-2", "mpi-2")
@pytest.mark.parametrize(
    "algorithm", ["adapt_with_combine", "adapt_then_combine", "gradient_allreduce"]
)
def test_training(world, algorithm):
    """Three steps give the same parameters and distance under another default device."""
    assert world.run(trained, algorithm, "meta") == world.run(trained, algorithm, "cpu")
