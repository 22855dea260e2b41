"""Checkpoints of all ranks: exact on as many ranks, averages on others, alike on all transports."""

from __future__ import annotations

import os
import re
import resource
from functools import partial
from pathlib import Path

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from tests.conformance.test_method_checkpoints import made as any_method
from tests.support import LoopbackWorld, on
from tests.support.bagua_net import LR, momentum_sgd, net, vector
from tests.support.bagua_training import Run
from tests.support.methods import one_of_each_kind

SOME = on("loopback-1", "loopback-4", "mpi-2")
METHODS = ["adapt_then_combine", "adapt_with_combine", "choco_sgd", "low_precision_decentralized"]


def made(method, **options):
    if method.startswith("adapt"):
        options = {"topology": topology.one_peer_exponential(bf.size()), **options}
    run = Run(method, **{"make": momentum_sgd, **options})
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
    return run


def parts(run):
    return run.model, run.optimizer, run.scheduler


def train(run, steps):
    for _ in range(steps):
        run.train(1)
        run.scheduler.step()


def end(run):
    moments = [state["momentum_buffer"].clone() for state in run.plain.state.values()]
    return vector(run.model), moments, run.optimizer.counters, run.scheduler.get_last_lr()


def check_same(one, other):
    assert torch.equal(one[0], other[0])
    assert all(map(torch.equal, one[1], other[1]))
    assert one[2:] == other[2:]


def goes_on(method, folder):
    run = made(method)
    assert bf.load_checkpoint(folder, *parts(run)) is None
    train(run, 3)
    bf.save_checkpoint(folder, *parts(run), extra={"of": bf.rank()}, replicas="all")
    drawn, rounds = torch.rand(3), run.optimizer.round
    train(run, 4)
    again = made(method)
    train(again, 1)  # whatever it has done is forgotten
    found = bf.load_checkpoint(folder, *parts(again))
    assert found.exact
    assert (found.step, found.extra, again.optimizer.steps) == (3, {"of": bf.rank()}, 3)
    assert found.manifest["world_size"] == bf.size()
    assert (found.manifest["algorithm"], found.manifest["round"]) == (method, rounds)
    if bf.current().transport.name != "loopback":  # threads share one generator
        assert torch.equal(torch.rand(3), drawn)
    again.step = 3
    train(again, 4)
    check_same(end(again), end(run))


@SOME
def test_as_many_ranks_go_on_exactly(world, tmp_path):
    """Model, moments, method, schedule and random numbers: the trajectory is the same bits."""
    for method in METHODS:
        world.run(goes_on, method, str(tmp_path / method))


def saved(method, folder, replicas):
    run = made(method)
    train(run, 3)
    bf.save_checkpoint(folder, *parts(run), extra="words", replicas=replicas)
    return end(run)


def resumed(method, folder):
    run = made(method)
    train(run, 1)
    found = bf.load_checkpoint(folder, *parts(run))
    assert not found.exact
    assert (found.step, found.extra) == (3, "words")
    start = end(run)
    for bucket in run.optimizer._averager.buckets:
        for name, state in bucket.state.items():
            assert torch.equal(state, bucket.flat) or "public" in name, name
    run.step = 3
    train(run, 3)
    return start, end(run)[0], run.optimizer.steps


def mean(tensors):
    return torch.stack([one.double() for one in tensors]).mean(dim=0).to(tensors[0].dtype)


@on("loopback-4", "mpi-2")
@pytest.mark.parametrize("replicas", ["average", "all", "rank0"])
def test_another_number_of_ranks_takes_the_average(world, replicas, tmp_path):
    """Parameters and moments of the file are averages, or rank 0's; counters and rates go on."""
    for method in METHODS:
        folder = str(tmp_path / method)
        before = world.run(saved, method, folder, replicas)
        chosen = before[:1] if replicas == "rank0" else before
        starts = LoopbackWorld(3).run(resumed, method, folder)
        for (model, moments, counters, rate), _, steps in starts:
            torch.testing.assert_close(model, mean([one[0] for one in chosen]))
            for place, moment in enumerate(moments):
                torch.testing.assert_close(moment, mean([one[1][place] for one in chosen]))
            assert counters == before[0][2]
            assert rate == before[0][3]
            assert steps == 6
        spread = max(float((one[1] - starts[0][1]).abs().max()) for one in starts)
        assert spread < 0.5, "what the method remembers does not fit the models"


def save_any(method, folder):
    run = any_method(method)
    run.train(3)
    bf.save_checkpoint(folder, run.model, run.optimizer)
    return vector(run.model)


def load_any(method, folder):
    run = any_method(method)
    run.train(1)
    bf.load_checkpoint(folder, run.model, run.optimizer)
    start = vector(run.model)
    run.step = 3
    run.train(3)
    return start, run.optimizer.steps, bf.consensus_distance(run.model)


NEAR = {"deepsqueeze": 0.03}
"""Distances between models that travel in 8 bits: its errors do not vanish."""


@pytest.mark.parametrize("method", one_of_each_kind(ALGORITHMS))
def test_every_method_begins_from_the_average(method, tmp_path):
    """On other ranks all begin from it, and stay near each other as they go on."""
    average = mean(LoopbackWorld(3).run(save_any, method, tmp_path))
    for start, steps, distance in LoopbackWorld(2).run(load_any, method, tmp_path):
        torch.testing.assert_close(start, average)
        assert steps == 6
        assert distance < NEAR.get(method, 0.01)


def of_one_file(folder):
    run = made("adapt_then_combine")
    train(run, 2)
    bf.save_checkpoint(folder, *parts(run), replicas="all")
    train(run, 1)
    found = bf.load_checkpoint(folder, run.model, replicas="average")
    file = torch.load(found.folder / "average.pt", weights_only=True)
    assert file["manifest"]["algorithm"] == "adapt_then_combine"
    assert file["rng"].keys() == set(range(bf.size()))
    plain = net(0)
    plain.load_state_dict(file["model"])
    assert torch.equal(vector(plain), vector(run.model))
    assert bf.consensus_distance(run.model) == 0
    assert (found.folder / "average.pt").stat().st_size < 30_000 + 22_000 * bf.size()


@SOME
def test_the_average_of_a_checkpoint(world, tmp_path):
    """It is a file that plain torch reads, and what ``replicas="average"`` gives to all ranks."""
    world.run(of_one_file, str(tmp_path))


def on_disks_of_their_own(folder, replicas):
    mine = Path(folder, f"machine{bf.rank()}")
    mine.mkdir()
    before = Path.cwd()
    os.chdir(mine)
    try:
        run = made("adapt_then_combine")
        train(run, 2)
        bf.save_checkpoint("files", *parts(run), replicas=replicas)
        there = sorted(path.name for path in mine.rglob("*.pt"))
        train(run, 1)
        bf.save_checkpoint("files", *parts(run), replicas="all")
        if bf.rank() == 1:
            next(mine.rglob("step_0000000003/rank_*.pt")).write_bytes(b"")
        found = bf.load_checkpoint("files", *parts(run))
        return there, found.step, found.exact
    finally:
        os.chdir(before)


@on("mpi-2")
@pytest.mark.parametrize("replicas", ["average", "all"])
def test_disks_of_the_machines(world, replicas, tmp_path):
    """Ranks agree on the last checkpoint that each can read, from its disk or by message."""
    own = {"ranks_per_machine": 1}
    found = world.run(on_disks_of_their_own, str(tmp_path), replicas, settings=own)
    everyone = [[f"rank_0000{rank}.pt"] * (replicas == "all") for rank in range(2)]
    assert [one[0] for one in found] == [["average.pt", *everyone[0]], everyone[1]]
    assert [one[1:] for one in found] == [(2, replicas == "all")] * 2


def in_backward(folder, algorithm):
    sgd = partial(torch.optim.SGD, lr=LR, momentum=0.9)

    def wrapped():
        return bf.DecentralizedDataParallel(
            net(bf.rank()),
            lambda named: sgd([one for _, one in named]),
            topology=topology.ring(bf.size()),
            algorithm=algorithm,
        )

    def steps(module, count, first):
        for step in range(first, first + count):
            module(torch.full((2, 2), 0.1 * step + bf.rank())).square().mean().backward()

    module, again = wrapped(), wrapped()
    steps(module, 3, 0)
    bf.save_checkpoint(folder, module, replicas="all")
    steps(module, 3, 3)
    steps(again, 1, 0)
    found = bf.load_checkpoint(folder, again)
    assert (found.step, again.steps, found.manifest["algorithm"]) == (3, 3, algorithm)
    steps(again, 3, 3)
    assert torch.equal(vector(again), vector(module))


@on("loopback-2", "mpi-2")
@pytest.mark.parametrize("algorithm", ["adapt_with_combine", "adapt_then_combine"])
def test_decentralized_data_parallel(world, algorithm, tmp_path):
    """Its optimizers are saved with the module, and the run goes on exactly."""
    world.run(in_backward, str(tmp_path), algorithm)


def save(folder, step, features=4, **options):
    model = torch.nn.Linear(features, features)
    torch.nn.init.constant_(model.weight, step)
    bf.save_checkpoint(folder, model, step=step, **options)


def loaded(folder):
    model = torch.nn.Linear(4, 4)
    found = bf.load_checkpoint(folder, model)
    return found.step, model.weight[0, 0].item()


def limited(folder):
    """A save whose files exceed what rank 1, or the only process, may write."""
    save(folder, 1, replicas="all")
    bf.barrier()
    mine = bf.rank() == bf.size() - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # as a disk that is full
    bf.barrier()
    try:
        save(folder, 2, 300, replicas="all")
    finally:
        bf.barrier()
        if mine:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def after_that(folder):
    there = sorted(one.name for one in Path(folder).iterdir())
    bf.barrier()
    found = loaded(folder)
    save(folder, 3)
    return there, found, loaded(folder)


@on("loopback-2", "mpi-2")
def test_a_full_disk(world, tmp_path):
    """All ranks raise the same error; nothing of the new one is left, and the former is whole."""
    found = world.outcomes(limited, str(tmp_path))
    assert {one.error for one in found} == {"EnvironmentProblem"}
    messages = [one.message for one in found]
    assert len(set(messages)) == 1
    words = r"rank \d could not write .*step_0000000002/rank_0000\d.pt: .*File too large"
    assert re.search(words, messages[0]), messages
    expected = ["step_0000000001"], (1, 1.0), (3, 3.0)
    assert world.run(after_that, str(tmp_path)) == [expected] * 2
