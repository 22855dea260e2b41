"""The result of a search is kept in a file and in checkpoints, and used where it fits."""

from __future__ import annotations

import copy
import io
import json
import logging

import pytest
import torch

import asyncddp as bf
from tests.support import LoopbackWorld
from tests.unit.optim.autotune_reference import (
    FOUR,
    buckets_of,
    one_step,
    search,
    sgd,
    short,
    wrapped,
)
from tests.unit.optim.optim_reference import vector

# the file


def found(path, **options):
    """Search, or load what was found; gives the setting, and how it came about."""
    model, optimizer = wrapped(autotune=short(path=path, **options))
    search(optimizer, model)
    result = optimizer.autotune.result
    return result.setting, len(buckets_of(optimizer)), result.origin


def test_a_result_is_saved_and_loaded(tmp_path):
    """The second run measures nothing, and has the buckets of the first from the start."""
    path = tmp_path / "autotune.json"
    world = LoopbackWorld(2)
    first = world.run(found, path)
    assert [origin for *_, origin in first] == ["5 trials"] * 2
    setting, buckets, _ = first[0]
    saved = json.loads(path.read_text())
    assert saved["setting"] == setting
    assert saved["measured_on"]["ranks_per_machine"] == [2]
    assert saved["versions"]["torch"] == torch.__version__
    assert [len(one["seconds"]) for one in saved["tried"]].count(4) == 2

    def again():
        _, optimizer = wrapped(autotune=short(path=path if bf.rank() == 0 else None))
        assert optimizer.autotune.done
        assert f"loaded from {path}" in optimizer.autotune.report().splitlines()[0]
        result = optimizer.autotune.result
        return result.setting, len(buckets_of(optimizer)), result.origin

    assert world.run(again) == [(setting, buckets, f"loaded from {path}")] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_the_chosen_one_is_installed_whatever_it_is(tmp_path):
    """A result by hand, in which the four buckets are the fastest."""
    path = tmp_path / "autotune.json"
    LoopbackWorld(2).run(found, path)
    saved = json.loads(path.read_text())
    saved["setting"]["bucket_size_in_mb"] = FOUR
    path.write_text(json.dumps(saved))
    assert [buckets for _, buckets, _ in LoopbackWorld(2).run(found, path)] == [4, 4]


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        (4, {}, "topology: exponential_two(2) in place of exponential_two(4); ranks_per"),
        (2, {"bucket_sizes_in_mb": [FOUR]}, "it was chosen among other candidates"),
    ],
)
def test_a_result_of_something_else_is_not_used(tmp_path, caplog, size, options, reason):
    """A new search says why there is one, and its result takes the place of the old one."""
    path = tmp_path / "autotune.json"
    LoopbackWorld(2).run(found, path)
    before = path.read_text()
    with caplog.at_level(logging.INFO, "asyncddp"):
        again = LoopbackWorld(size).run(found, path, **options)
    assert "trials" in again[0][-1]
    assert f"{path} is of something else: {reason}" in caplog.text
    assert path.read_text() != before


def test_a_result_of_another_model_or_method_is_not_used(tmp_path):
    """It says what differs."""
    path = tmp_path / "autotune.json"
    LoopbackWorld(2).run(found, path)

    def reason(model, **options):
        autotune = short(path=path, bucket_sizes_in_mb=(3e-4, 1e-5))
        optimizer = bf.DistributedOptimizer(sgd(model), model, autotune=autotune, **options)
        return optimizer.autotune.done

    def case():
        wider = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        return reason(wider), reason(wrapped()[0], num_steps_per_communication=2)

    assert LoopbackWorld(2).run(case) == [(False, False)] * 2


@pytest.mark.parametrize("content", ["", "{", '{"setting": 3}', "[]", '"text"', "\0\xff"], ids=repr)
def test_a_broken_file_is_an_error_on_all_ranks(tmp_path, content):
    """Also on those that have not read it: nobody waits, and nobody trains by it."""
    path = tmp_path / "autotune.json"
    path.write_text(content, encoding="latin-1")

    def case():
        with pytest.raises(bf.ArgumentError, match="holds no result of a search"):
            wrapped(autotune=short(path=path))

    LoopbackWorld(2).run(case)


def test_a_file_that_cannot_be_written_is_found_out_before_or_told(tmp_path, caplog):
    """A directory that is not there is an error at once; a disk that fails later a warning."""

    def refused():
        with pytest.raises(bf.ArgumentError, match="is no directory"):
            wrapped(autotune=short(path=tmp_path / "none" / "autotune.json"))

    LoopbackWorld(2).run(refused)
    (tmp_path / "autotune.json.part").mkdir()
    assert "trials" in LoopbackWorld(2).run(found, tmp_path / "autotune.json")[0][-1]
    assert "autotune: the result could not be written" in caplog.text


# checkpoints


def saved_and_loaded(optimizer):
    """The state as a checkpoint brings it back, without pickle's powers."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_search_goes_on_after_a_resume():
    """In the midst of it: what was measured counts, and the rest is measured."""

    def case():
        model, optimizer = wrapped(autotune=short())
        while optimizer.autotune._search.measurements < 5:
            one_step(optimizer, model, 0)
        state, measured = saved_and_loaded(optimizer), optimizer.autotune._tried()
        in_use = len(buckets_of(optimizer))
        other, resumed = wrapped(autotune=short(), rank=7)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        assert resumed.autotune._tried() == measured
        assert len(buckets_of(resumed)) == in_use
        assert not resumed.autotune.done
        steps = len(search(resumed, other))
        result = resumed.autotune.result
        assert sum(len(one.seconds) for one in result.tried) == 10
        return steps < 5 * 2 + 5, resumed.steps

    every = LoopbackWorld(2).run(case)
    assert every == [(True, every[0][1])] * 2


@pytest.mark.parametrize("algorithm", ["adapt_then_combine", "choco_sgd"])
def test_a_choice_survives_a_resume(algorithm):
    """The resumed run measures nothing, and goes on bit by bit as the one that was not ended."""

    def case():
        model, optimizer = wrapped(algorithm, autotune=short())
        search(optimizer, model)
        model_state = copy.deepcopy(model.state_dict())
        state = saved_and_loaded(optimizer)
        other, resumed = wrapped(algorithm, autotune=short(), rank=7)
        other.load_state_dict(model_state)
        resumed.load_state_dict(state)
        assert resumed.autotune.result.setting == optimizer.autotune.result.setting
        for step in range(4):
            one_step(resumed, other, step)
        for step in range(4):
            one_step(optimizer, model, step)
        assert buckets_of(resumed) == buckets_of(optimizer)
        return torch.equal(vector(model), vector(other))

    assert LoopbackWorld(2).run(case) == [True, True]


def test_a_state_of_another_search_counts_for_nothing():
    """One among other candidates, or none at all: the search of this run goes on."""

    def case():
        model, optimizer = wrapped(autotune=short())
        search(optimizer, model)
        _, other = wrapped(autotune=short(bucket_sizes_in_mb=[FOUR]))
        other.load_state_dict(saved_and_loaded(optimizer))
        _, plain = wrapped()
        plain.load_state_dict(saved_and_loaded(optimizer))
        _, fresh = wrapped(autotune=short())
        fresh.load_state_dict(saved_and_loaded(plain))
        return other.autotune.done, plain.autotune, fresh.autotune.done

    assert LoopbackWorld(2).run(case) == [(False, None, False)] * 2
