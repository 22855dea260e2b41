"""Checkpoints that cannot be written or read: words on every rank, and the former ones stay."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import threading
import zipfile

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp.checkpoint.files import write_whole
from tests.support import LoopbackWorld

MANIFEST = "manifest.json"


def model_of(value, features=4):
    model = torch.nn.Linear(features, features)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(folder, step, value=None, **options):
    model = model_of(step if value is None else value)
    return bf.save_checkpoint(folder, model, step=step, **options)


def files_in(folder):
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def loaded(folder, **options):
    model = model_of(-1.0)
    found = bf.load_checkpoint(folder, model, **options)
    return None if found is None else (found.step, model.weight[0, 0].item())


def refused(world, case, *args):
    """The messages of all ranks, which all raised the same kind of error."""
    found = world.outcomes(case, *args)
    assert len({one.error for one in found}) == 1, found
    return found[0].error, [one.message for one in found]


# what stays


def test_the_last_ones_stay(tmp_path):
    """``keep`` of them, and all with None; what others have put there is left alone."""

    def case():
        for step in (1, 2, 3):
            save(tmp_path, step, keep=None)
        (tmp_path / "step_0000000001" / "notes.txt").write_text("mine")
        (tmp_path / "other").mkdir(exist_ok=True)
        bf.barrier()
        save(tmp_path, 4, keep=2)

    LoopbackWorld(2).run(case)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "other",
        "step_0000000001",
        "step_0000000003",
        "step_0000000004",
    ]
    assert files_in(tmp_path / "step_0000000001") == ["notes.txt"]


def test_a_run_that_went_back(tmp_path):
    """The last saved counts, not the largest step; the same step is replaced."""

    def case():
        for step in (1, 2, 3):
            save(tmp_path, step, keep=2)
        assert loaded(tmp_path, step=2) == (2, 2.0)
        save(tmp_path, 2, 7.0, keep=2, replicas="all")
        assert loaded(tmp_path) == (2, 7.0)
        assert loaded(tmp_path, step=3) == (3, 3.0)
        assert loaded(tmp_path / "step_0000000003") == (3, 3.0)

    LoopbackWorld(2).run(case)
    names = ["average.3.pt", MANIFEST, "rank_00000.3.pt", "rank_00001.3.pt"]
    assert files_in(tmp_path / "step_0000000002") == names


# half-written and damaged


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    content = bytearray(file.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    file.write_bytes(content)


def invert(file, place):
    """Invert the bits of one byte; the size stays."""
    content = bytearray(file.read_bytes())
    content[place] ^= 255
    file.write_bytes(content)


def as_before_digests(folder, **changes):
    """Write a manifest as versions did that knew no digests, with changes."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["digest"], content["digests"]
    (folder / MANIFEST).write_text(json.dumps({**content, **changes}))


def wrong_manifest(words, **changes):
    return (lambda folder: as_before_digests(folder, **changes), f"cannot be read: .*{words}")


def with_pickle(content):
    """Damage: the pickle in a file is another one."""

    def damage(folder):
        file = folder / "average.pt"
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, content if name.endswith("data.pkl") else part)
        as_before_digests(folder, files={"average.pt": file.stat().st_size})

    return damage, "could not read .*average.pt: it is damaged"


def last_weight(file):
    """The place of the last byte of the last weight in a file of :func:`model_of` 2."""
    return file.read_bytes().rindex(torch.full((4,), 2.0).numpy().tobytes()) + 15


DAMAGE = {
    "a bit": (lambda f: invert(f / "average.pt", last_weight(f / "average.pt")), "not the digest"),
    "a digit": (
        lambda f: (f / MANIFEST).write_text(
            (f / MANIFEST).read_text().replace('"step": 2', '"step": 3')
        ),
        "cannot be read: it is damaged: it has not the digest",
    ),
    "no pickle": with_pickle(b"\x80\x02."),
    "half a number": with_pickle(b"\x80\x02J\x01"),
    "no files": wrong_manifest("0 files are not those of replicas='average'", files={}),
    "other files": wrong_manifest("the size of average.*.pt", files={"../average.pt": 1}),
    "more files": wrong_manifest("2 files", files={"average.pt": 1, "rank_00000.pt": 1}),
    "many ranks": wrong_manifest("1 files", replicas="all", world_size=10**12),
    "odd kind": wrong_manifest("replicas='some'", replicas="some"),
    "odd size": wrong_manifest("the size of average.pt", files={"average.pt": "1"}),
    "truth": wrong_manifest("step as int, got True", step=True),
    "large": wrong_manifest("", round=10**30),
    "half a letter": wrong_manifest("", time="\ud800"),
    "nested": (lambda f: (f / MANIFEST).write_text("[" * 10**6), "cannot be read"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "half-written: it has no manifest.json"),
    "half a file": (lambda f: halve(f / "average.pt"), "no rank has a whole average.pt"),
    "no file": (lambda f: (f / "average.pt").unlink(), "no rank has a whole average.pt"),
    "zeros": (lambda f: flip(f / "average.pt"), "could not read .*average.pt: it is damaged"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "manifest.json cannot be read"),
    "no format": (lambda f: (f / MANIFEST).write_text("{}"), "expected format as int, got None"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_damaged_is_skipped_with_words(kind, ranks, tmp_path, caplog):
    """A warning names folder and reason, and the one before is loaded, on all ranks."""
    damage, words = DAMAGE[kind]
    world = LoopbackWorld(ranks)
    world.run(lambda: (save(tmp_path, 1), save(tmp_path, 2)))
    damage(tmp_path / "step_0000000002")
    with caplog.at_level(logging.WARNING, "asyncddp"):
        assert world.run(lambda: loaded(tmp_path)) == [(1, 1.0)] * ranks
    (warned,) = [one.getMessage() for one in caplog.records]
    assert re.search(rf"load_checkpoint: .*step_0000000002 is skipped: .*{words}", warned), warned


@pytest.mark.parametrize("kind", DAMAGE)
def test_where_nothing_else_is_there(kind, tmp_path):
    """A half-written one is a fresh start; a damaged one is an error, and so is a named one."""
    damage, _ = DAMAGE[kind]
    world = LoopbackWorld(2)
    world.run(save, tmp_path, 2)
    damage(tmp_path / "step_0000000002")
    if kind == "no manifest":
        assert world.run(loaded, tmp_path) == [None, None]
        save_again = world.run(lambda: (save(tmp_path, 3), loaded(tmp_path))[1])
        assert save_again == [(3, 3.0)] * 2
        assert not (tmp_path / "step_0000000002").exists(), "the next save removes it"
    else:
        error, _ = refused(world, loaded, tmp_path)
        assert error == "EnvironmentProblem"
    error, messages = refused(world, lambda: loaded(tmp_path, step=2))
    assert error == "EnvironmentProblem", messages
    assert "checkpoint" in messages[1]


def test_a_file_of_a_rank_is_missing(tmp_path):
    """The error names rank and file, and says how to begin from the average."""
    world = LoopbackWorld(2)
    world.run(lambda: save(tmp_path, 2, float(bf.rank()), replicas="all"))
    (tmp_path / "step_0000000002" / "rank_00001.pt").unlink()
    error, messages = refused(world, loaded, tmp_path)
    assert error == "EnvironmentProblem"
    assert "rank 1 has no whole rank_00001.pt; replicas='average' needs" in messages[0]
    assert messages[0] == messages[1]
    assert world.run(lambda: loaded(tmp_path, replicas="average")) == [(2, 0.5)] * 2


def with_bad_random_state(digests, tmp_path):
    """Two checkpoints of two ranks; rank 1's random state in the last one is damaged."""
    world = LoopbackWorld(2)
    for step in (1, 2):
        world.run(lambda step: save(tmp_path, step, float(bf.rank()), replicas="all"), step)
    folder = tmp_path / "step_0000000002"
    file = folder / "rank_00001.pt"
    invert(file, file.read_bytes().index(b'["MT19937", ['))
    if not digests:
        as_before_digests(folder)
    return world


@pytest.mark.parametrize("digests", [True, False])
def test_one_bad_byte_in_a_random_state_of_one_rank(digests, tmp_path, caplog):
    """It is found before anything is changed: all ranks take the one before, or raise an error."""
    world = with_bad_random_state(digests, tmp_path)

    def case():
        model = model_of(7.0)
        try:
            bf.load_checkpoint(tmp_path, model, step=2)
        finally:
            assert all(bool((one == 7.0).all()) for one in model.parameters())

    error, messages = refused(world, case)
    assert error == "EnvironmentProblem"
    assert messages[0] == messages[1]
    words = r"no checkpoint of step 2 can be read in .*: rank 1 could not read .*rank_00001.pt: it"
    assert re.search(words, messages[0]), messages
    assert messages[0].endswith("others that are there: 1")
    with caplog.at_level(logging.WARNING, "asyncddp"):
        assert world.run(loaded, tmp_path) == [(1, 0.0), (1, 1.0)]
    (warned,) = [one.getMessage() for one in caplog.records]
    assert re.search(r"step_0000000002 is skipped: .*rank_00001.pt: it is damaged", warned)


def test_a_named_one_whose_manifest_is_damaged(tmp_path):
    """The error says why it cannot be read."""
    world = LoopbackWorld(2)
    world.run(lambda: (save(tmp_path, 1), save(tmp_path, 2)))
    (tmp_path / "step_0000000002" / MANIFEST).write_text("{")
    _, messages = refused(world, lambda: loaded(tmp_path, step=2))
    assert re.search(r"step 2 can be read in .*: manifest.json cannot be read: ", messages[1])


def test_nothing_is_there(tmp_path):
    """None for a fresh start; an error where one was asked for by its step."""
    world = LoopbackWorld(2)
    assert world.run(loaded, tmp_path / "new") == [None, None]
    world.run(save, tmp_path, 5)
    error, messages = refused(world, lambda: loaded(tmp_path, step=4))
    assert error == "EnvironmentProblem"
    assert "no checkpoint of step 4 can be read" in messages[1]
    assert "others that are there: 5" in messages[1]


# disks


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_path_that_cannot_be(below, tmp_path):
    """A file where the folder should be: an error on all ranks, to save and to load."""
    (tmp_path / "file").write_text("mine")
    world = LoopbackWorld(2)
    for case in (lambda: save(tmp_path / below, 1), lambda: loaded(tmp_path / below)):
        error, messages = refused(world, case)
        assert error == "EnvironmentProblem"
        assert re.search(r"rank 0 could not (write to|read) .*file.*: .*directory", messages[1])
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_is_whole_or_not_there(tmp_path):
    """An error in the middle of writing leaves the file before, and no other."""

    def half(file):
        file.write_text("half")
        raise KeyboardInterrupt

    write_whole(tmp_path / "file", lambda file: file.write_text("whole"))
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", half)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["whole"]


# arguments


@pytest.mark.parametrize(
    "differing",
    [
        lambda folder: save(f"{folder}{bf.rank()}", 1),
        lambda folder: save(folder, bf.rank()),
        lambda folder: save(folder, 1, keep=1 + bf.rank()),
        lambda folder: save(folder, 1, replicas=("all", "average")[bf.rank()]),
        lambda folder: bf.save_checkpoint(folder, model_of(1, 2 + bf.rank()), step=1),
    ],
    ids=["path", "step", "keep", "replicas", "model"],
)
def test_ranks_that_disagree(differing, tmp_path):
    """MismatchError on all ranks, and nothing is saved."""
    error, messages = refused(LoopbackWorld(2), differing, tmp_path / "new")
    assert error == "MismatchError"
    assert "save_checkpoint needs" in messages[0]
    assert "save_checkpoint needs" in messages[1]
    assert not any(one.suffix == ".pt" for one in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"loss": np.float64(1.0)}, r"extra\['loss'\]: .* got numpy.float64; .*\.item\(\)"),
        ({"a": [1, {"b": range(3)}]}, r"extra\['a'\]\[1\]\['b'\]: .* got range"),
        (threading.Lock(), r"extra: .* got _thread.lock"),
        ({frozenset([1]): 2}, r"extra: key frozenset\(\{1\}\): "),
    ],
)
def test_extra_that_could_not_be_loaded(extra, where, tmp_path):
    """The entry is named on all ranks before anything is written, whichever rank has it."""

    def case():
        save(tmp_path / "new", 1, extra=extra if bf.rank() == 1 else None)

    error, messages = refused(LoopbackWorld(2), case)
    assert error == "ArgumentError"
    assert re.match(f"save_checkpoint: argument {where}", messages[0]), messages
    assert messages[0] == messages[1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replicas": "mean"}, "argument replicas: expected one of 'average', 'rank0', 'all'"),
        ({"keep": 0}, "argument keep: expected None or a whole number of at least 1, got 0"),
        ({"step": -1}, "argument step: expected a whole number of at least 0, got -1"),
        ({"step": None}, "argument step: expected a number, since no DistributedOptimizer"),
        ({"path": 3}, "argument path: expected a folder's name, got 3"),
        ({"model": [1]}, "argument model: expected a torch.nn.Module, got list"),
    ],
)
def test_arguments_that_cannot_be(arguments, words, tmp_path):
    """Each is named, with what was expected."""
    given = {"path": tmp_path / "new", "model": model_of(1), "step": 1, **arguments}
    error, messages = refused(LoopbackWorld(1), lambda: bf.save_checkpoint(**given))
    assert error == "ArgumentError"
    assert words in messages[0], messages


# what does not fit


def trained(algorithm="adapt_then_combine", features=4):
    model = model_of(1.0, features)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = bf.DistributedOptimizer(sgd, model, algorithm)
    model(torch.ones(1, features)).sum().backward()
    optimizer.step()
    return model, optimizer


def of_another_model():
    model, optimizer = trained(features=3)
    model.register_buffer("more", torch.zeros(1))
    return model, optimizer


def of_other_groups():
    model, _ = trained()
    sgd = torch.optim.SGD([{"params": [one]} for one in model.parameters()], lr=0.1)
    return model, bf.DistributedOptimizer(sgd, model, "adapt_then_combine")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (of_another_model, r"it lacks more; weight has shape \(4, 4\) in it, and \(3, 3\) in the"),
        (of_other_groups, r"has groups of \[2\] parameters, and the optimizer of \[1, 1\]"),
        (
            lambda: trained("gradient_allreduce"),
            "is of adapt_then_combine, .* with gradient_allreduce; make it with algorithm='adapt_t",
        ),
        (
            lambda: (*trained(), torch.optim.lr_scheduler.StepLR(trained()[1], 1)),
            "argument scheduler: expected None, since the checkpoint was saved without one",
        ),
    ],
    ids=["model", "groups", "algorithm", "scheduler"],
)
@pytest.mark.parametrize("replicas", ["all", "average"])
def test_what_does_not_fit_is_refused(other, words, replicas, tmp_path):
    """On all ranks, before anything is changed."""
    world = LoopbackWorld(2)
    world.run(lambda: bf.save_checkpoint(tmp_path, *trained(), replicas=replicas))

    def case():
        parts = other()
        before = [one.clone() for one in parts[0].parameters()]
        try:
            bf.load_checkpoint(tmp_path, *parts)
        finally:
            assert all(map(torch.equal, before, parts[0].parameters()))

    error, messages = refused(world, case)
    assert error == "ArgumentError"
    assert re.search(words, messages[0]), messages
    assert messages[0] == messages[1]


def test_a_scheduler_that_refuses_its_state(tmp_path):
    """Model and optimizer are as they were, on all ranks."""
    world, schedulers = LoopbackWorld(2), torch.optim.lr_scheduler

    def parts(chained):
        model, optimizer = trained()
        plain = schedulers.StepLR(optimizer, 1)
        return model, optimizer, schedulers.ChainedScheduler([plain]) if chained else plain

    world.run(lambda: bf.save_checkpoint(tmp_path, *parts(chained=False)))

    def case():
        model, optimizer, scheduler = parts(chained=True)
        with torch.no_grad():
            model.weight.fill_(7.0)
        try:
            bf.load_checkpoint(tmp_path, model, optimizer, scheduler)
        finally:
            assert bool((model.weight == 7.0).all())

    error, messages = refused(world, case)
    assert error == "EnvironmentProblem"
    assert messages[0] == messages[1]
    assert "rank 0 could not load: '_schedulers'" in messages[0]


def test_a_plain_optimizers_checkpoint_for_a_module_that_makes_its_own(tmp_path):
    """It is refused before the model is changed."""
    world = LoopbackWorld(2)
    world.run(lambda: bf.save_checkpoint(tmp_path, *trained()))

    def case():
        module = bf.DecentralizedDataParallel(
            model_of(7.0), lambda named: torch.optim.SGD([one for _, one in named], lr=0.1)
        )
        try:
            bf.load_checkpoint(tmp_path, module)
        finally:
            assert all(bool((one == 7.0).all()) for one in module.parameters())

    error, messages = refused(world, case)
    assert error == "ArgumentError"
    assert "expected what optim_state_dict() of a DecentralizedDataParallel" in messages[0]


def test_equal_replicas_keep_their_bits(tmp_path):
    """Where all ranks hold one model, its average and its moments' are it, on any number."""

    def case():
        model, optimizer = trained("gradient_allreduce")
        with torch.no_grad():
            model.weight.copy_(torch.rand(4, 4, generator=torch.Generator().manual_seed(1)) / 3)
        bf.save_checkpoint(tmp_path, model, optimizer)
        again, other = trained("gradient_allreduce")
        bf.load_checkpoint(tmp_path, again, other)
        before = optimizer.state[model.weight]["momentum_buffer"]
        assert torch.equal(before, other.state[again.weight]["momentum_buffer"])
        assert torch.equal(model.weight, again.weight)

    LoopbackWorld(7).run(case)


def test_clocks_of_ranks_may_differ(tmp_path, monkeypatch):
    """A save has one time, whatever each rank's clock shows: its files are of one save."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(minutes=bf.rank())

    monkeypatch.setattr("asyncddp.checkpoint.save.datetime", Clock)

    def case():
        save(tmp_path, 3, bf.rank(), replicas="all")
        return loaded(tmp_path)

    assert LoopbackWorld(3).run(case) == [(3, 0.0), (3, 1.0), (3, 2.0)]


def test_ranks_may_have_made_different_numbers_of_steps(tmp_path):
    """One-sided methods' ranks do, and each goes on exactly from a save in which they did."""

    def case():
        model = model_of(bf.rank())
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedOptimizer(sgd, model, "win_put", broadcast=False)
        for _ in range(1 + bf.rank()):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        bf.barrier()
        own = model.weight.detach().clone()
        bf.save_checkpoint(tmp_path, model, optimizer, step=1, replicas="all")
        bf.load_checkpoint(tmp_path, model, optimizer)
        return torch.equal(model.weight, own)

    assert LoopbackWorld(3).run(case) == [True] * 3


def test_outside_of_a_world(tmp_path):
    """A checkpoint is that of all ranks: without ``init()`` there are none."""
    with pytest.raises(bf.NotInitializedError):
        save(os.fspath(tmp_path), 1)
