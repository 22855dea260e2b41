"""Bagua's ``save_checkpoint`` and ``load_checkpoint``: its files, whole or not there."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

import asyncddp as bf
from asyncddp.integrations.bagua.checkpointing import load_checkpoint, save_checkpoint

COMMON = "mp_rank_00_model_states.pt"
TRACKER = "latest_checkpointed_iteration.txt"


def training(seed=0):
    """A model, its optimizer and scheduler after some steps."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    step(model, optimizer, scheduler, 2, seed)
    return model, optimizer, scheduler


def step(model, optimizer, scheduler, count, seed):
    for place in range(count):
        generator = torch.Generator().manual_seed(100 * seed + place)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def assert_equal(model, other):
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def files_in(folder):
    return sorted(
        str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()
    )


def test_the_files_are_baguas(tmp_path):
    """One folder for each iteration, and a file with the newest number."""
    model, optimizer, scheduler = training()
    assert load_checkpoint(tmp_path / "new", model) == 0
    for iteration in (5, 12345678, 40):
        save_checkpoint(iteration, tmp_path / "new", model, optimizer, scheduler)
    assert files_in(tmp_path / "new") == [
        f"iter_0000005/{COMMON}",
        f"iter_0000040/{COMMON}",
        f"iter_12345678/{COMMON}",
        TRACKER,
    ]
    assert (tmp_path / "new" / TRACKER).read_text() == "40"
    saved = torch.load(tmp_path / "new" / "iter_0000040" / COMMON)
    assert list(saved) == ["iteration", "world_size", "model", "optimizer", "lr_scheduler"]
    assert saved["iteration"] == 40


def test_a_run_goes_on_exactly(tmp_path):
    """Model with buffers, moments and schedule: the rest is the same bit for bit."""
    ours = training()
    save_checkpoint(2, str(tmp_path), *ours)
    theirs = training(seed=1)
    assert load_checkpoint(str(tmp_path), *theirs) == 2
    for one in (ours, theirs):
        step(*one, 4, 7)
    assert_equal(ours[0], theirs[0])
    assert ours[1].param_groups[0]["lr"] == theirs[1].param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_model_alone(tmp_path):
    """Optimizer and scheduler may be left out, and are missed only where they are asked for."""
    model, optimizer, scheduler = training()
    save_checkpoint(3, tmp_path, model)
    other = training(seed=1)[0]
    assert load_checkpoint(tmp_path, other) == 3
    assert_equal(model, other)
    another = training(seed=2)[0]
    with pytest.raises(bf.ArgumentError, match=r"argument optimizer: .* saved without one"):
        load_checkpoint(tmp_path, another, optimizer)
    assert_equal(another, training(seed=2)[0])
    with pytest.raises(bf.ArgumentError, match=r"argument lr_scheduler: .* saved without one"):
        load_checkpoint(tmp_path, other, None, scheduler)


def test_strict_is_honoured(tmp_path):
    """Another model is refused, or with strict=False given what fits."""
    model, _, _ = training()
    save_checkpoint(3, tmp_path, model)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_checkpoint(tmp_path, other)
    assert load_checkpoint(tmp_path, other, strict=False) == 3
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("iteration", [-1, 2.5, None])
def test_iterations_that_cannot_be(iteration, tmp_path):
    """Nothing is written for them."""
    with pytest.raises(bf.ArgumentError, match="save_checkpoint: argument iteration"):
        save_checkpoint(iteration, tmp_path / "new", training()[0])
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    """The error names the file, nothing half written stays, and the older one is loaded."""
    model, _, _ = training()
    save_checkpoint(1, tmp_path, model)
    before = files_in(tmp_path)
    large = torch.nn.Linear(300, 300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(bf.EnvironmentProblem, match=r"could not write .*iter_0000002"):
            save_checkpoint(2, tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_in(tmp_path) == before
    assert load_checkpoint(tmp_path, model) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "iter_0000004" / COMMON).unlink(), "No such file .*iter_0000004"),
        (lambda path: (path / "iter_0000004" / COMMON).write_bytes(b"PK12"), "could not read"),
        (lambda path: (path / TRACKER).write_text("four"), "expected a number in it, got 'four'"),
        (lambda path: (path / TRACKER).write_text("9" * 30), "expected a number in it, got '999"),
        (
            lambda path: torch.save([1], path / "iter_0000004" / COMMON),
            "is no checkpoint of a model",
        ),
    ],
)
def test_damage_is_told(damage, words, tmp_path):
    """What is missing or unreadable is named, on every rank."""
    save_checkpoint(4, tmp_path, training()[0])
    damage(tmp_path)

    def case(who):
        with pytest.raises(bf.EnvironmentProblem, match=f"load_checkpoint: {who}.*{words}"):
            load_checkpoint(tmp_path, training()[0])

    case("")
    with bf.local_world(2) as world:
        world.run(case, "rank 0 ")


# ranks


def test_rank_zero_saves_for_all(tmp_path):
    """One file of rank 0's model, there when any rank returns; all ranks load it."""

    def case():
        mine = training(seed=bf.rank())
        save_checkpoint(7, tmp_path, *mine)
        assert files_in(tmp_path) == [f"iter_0000007/{COMMON}", TRACKER]
        assert load_checkpoint(tmp_path, *mine) == 7
        assert_equal(mine[0], training(seed=0)[0])

    with bf.local_world(3) as world:
        world.run(case)


def test_each_rank_saves_its_own(tmp_path):
    """With ``per_rank`` ranks go on from their own models; loading needs no word of it."""

    def case():
        mine, other = training(seed=bf.rank()), training(seed=9)
        save_checkpoint(7, tmp_path, *mine, per_rank=True)
        assert load_checkpoint(tmp_path, *other) == 7
        assert_equal(mine[0], other[0])

    with bf.local_world(3) as world:
        world.run(case)
    names = [f"iter_0000007/rank_0000{rank}_states.pt" for rank in range(3)]
    assert files_in(tmp_path) == [*names, TRACKER]

    def other_size():
        with pytest.raises(bf.EnvironmentProblem, match=r"files of 3 ranks, and this world has 2"):
            load_checkpoint(tmp_path, training()[0])

    with bf.local_world(2) as world:
        world.run(other_size)


@pytest.mark.parametrize("first", [False, True])
def test_the_same_iteration_again_in_the_other_way(first, tmp_path):
    """Of an iteration there is what was saved last."""

    def case():
        mine, other = training(seed=bf.rank()), training(seed=9)
        save_checkpoint(7, tmp_path, training(seed=5)[0], per_rank=first)
        save_checkpoint(7, tmp_path, mine[0], per_rank=not first)
        load_checkpoint(tmp_path, other[0])
        assert_equal(other[0], training(seed=0 if first else bf.rank())[0])

    with bf.local_world(2) as world:
        world.run(case)


def test_a_rank_that_cannot_write_is_named_on_all(tmp_path):
    """Nobody goes on as if all had been saved; the older checkpoint stays the newest."""

    def case():
        model = training()[0]
        save_checkpoint(1, tmp_path, model, per_rank=True)
        if bf.rank() == 1:
            (tmp_path / "iter_0000002" / "rank_00001_states.pt").mkdir(parents=True)
        bf.barrier()
        with pytest.raises(bf.EnvironmentProblem, match=r"rank 1 could not write .*rank_00001"):
            save_checkpoint(2, tmp_path, model, per_rank=True)
        return (tmp_path / TRACKER).read_text()

    with bf.local_world(2) as world:
        assert world.run(case) == ["1", "1"]


def test_folders_that_are_not_shared(tmp_path):
    """Ranks that find different iterations, or none, are named, and nobody loads."""

    def case():
        own = tmp_path / str(bf.rank())
        own.mkdir()
        if bf.rank() == 0:
            (own / TRACKER).write_text("10")
        words = (
            "rank 0 finds iteration 10 in .*, and rank 1 finds no checkpoint; .* all ranks share"
        )
        with pytest.raises(bf.EnvironmentProblem, match=words):
            load_checkpoint(own, training()[0])

    with bf.local_world(2) as world:
        world.run(case)


def test_the_wrapper_and_its_counters(tmp_path):
    """``DistributedOptimizer`` is saved and loaded with the number of its rounds."""

    def case():
        model = training(seed=bf.rank())[0]
        optimizer = bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        save_checkpoint(1, tmp_path, model, optimizer, per_rank=True)
        other = training(seed=9)[0]
        resumed = bf.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other)
        assert load_checkpoint(tmp_path, other, resumed) == 1
        assert_equal(model, other)
        return resumed.round

    with bf.local_world(2) as world:
        assert world.run(case) == [1, 1]
