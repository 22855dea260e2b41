"""``torch.set_default_device`` before ``init()``: the library's own tensors stay on the host."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import asyncddp as bf
from asyncddp import topology
from tests.gpu.cases import prepare, verbs
from tests.support import run_on_mpirun
from tests.support.oracle import held

PACKAGES = [Path(module.__file__).parent for module in (bf, topology)]
FACTORIES = {factory.__name__ for factory in _device_constructors()}
ON_THE_DEFAULT_DEVICE = {("testing/oracle.py", "torch.tensor")}
"""Asks for the caller's default device, and so must not name one."""


def program(device):
    """A program that sets a default device, as users do, before it imports the library."""
    return f"""
import torch
torch.set_default_device("{device}")
import asyncddp as bf
from tests.gpu.thread_cases import verbs_on_default
from tests.unit.device.test_default_device_runs import whole_run
bf.init(timeout=60.0)
whole_run()
if "{device}" == "cuda":
    verbs_on_default()
rank = bf.rank()
bf.shutdown()
print(f"rank {{rank}} is done", flush=True)
"""


def trained():
    """Parameters after broadcasts and three steps of an optimizer, on the host."""
    with torch.device("cpu"):
        model = torch.nn.Linear(4, 3)
        start = held(bf.rank(), (15,), torch.float32)
        torch.nn.utils.vector_to_parameters(start, model.parameters())
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = [held(bf.rank(), (5, 4), torch.float32, seed=step) for step in range(3)]
    optimizer = bf.DistributedOptimizer(inner, model, topology=topology.ring(bf.size()))
    bf.broadcast_parameters(model.state_dict())
    for inputs in data:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        bf.broadcast_optimizer_state(optimizer)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def mixed(x):
    """A tensor mixed with its neighbours' by a window."""
    bf.win_create(x.clone(), "x")
    bf.win_put(x, "x")
    bf.barrier()
    got = bf.win_update("x", clone=True)
    bf.barrier()
    bf.win_free("x")
    return got


def whole_run():
    """All that a program does between init and shutdown gives what it gives by default."""
    prepare()
    with torch.device("cpu"):
        x = held(bf.rank(), (70_001,), torch.float32)
    cases = {**verbs(), "window": mixed, "training": lambda _: trained()}
    for name, case in cases.items():
        got = case(x)
        with torch.device("cpu"):
            known = case(x)
        assert got.device.type == "cpu", name
        assert torch.equal(got, known), name
    assert bf.broadcast_object({"lr": 0.1} if bf.rank() == 0 else None) == {"lr": 0.1}


def test_ranks_that_are_threads():
    """Under another default device of its thread a rank gives the host's results."""

    def case():
        torch.set_default_device("meta")
        whole_run()

    with bf.local_world(2, timeout=60.0, ranks_per_machine=1) as world:
        world.run(case)


@pytest.mark.launches
@pytest.mark.parametrize("transports", [None, "auto"], ids=["default", "negotiated"])
def test_ranks_that_are_processes(tmp_path, transports):
    """Under another default device from before init on, a whole run gives the host's results."""
    environ = {} if transports is None else {"ASYNCDDP_DEVICE_TRANSPORTS": transports}
    done = run_on_mpirun(2, program("meta"), tmp_path, environ=environ, timeout=120.0)
    assert done.code == 0, done
    assert {"rank 0 is done", "rank 1 is done"} <= set(done.stdout.splitlines()), done


# the source


def without_device(source):
    """Torch's factories that a module names other than in a call with ``device=``, by line."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {id(call.func) for call in calls if "device" in {word.arg for word in call.keywords}}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((f"torch.{a.name}", node.lineno) for a in node.names if a.name in FACTORIES)
        if isinstance(node, ast.Attribute) and node.attr in FACTORIES and id(node) not in named:
            path = ast.unparse(node)
            if path.startswith("torch."):
                yield path, node.lineno


def test_what_the_test_of_the_source_finds():
    """A call without device, another use and an import are found; a call with device is not."""
    found = set(without_device("torch.zeros(3)\nmake = torch.empty"))
    assert found == {("torch.zeros", 1), ("torch.empty", 2)}
    assert list(without_device("from torch import tensor, float32")) == [("torch.tensor", 1)]
    assert list(without_device("torch.ones(3, device=device); x.zeros(2)")) == []


def test_every_tensor_that_the_library_makes_names_its_device():
    """No factory of torch that follows the default device is used without ``device=``."""
    found = []
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            name = path.relative_to(package).as_posix()
            for factory, line in without_device(path.read_text(encoding="utf-8")):
                if (name, factory) not in ON_THE_DEFAULT_DEVICE:
                    found.append(f"{package.name}/{name}:{line} {factory}")
    assert found == []
