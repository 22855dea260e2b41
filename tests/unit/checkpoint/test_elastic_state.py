"""``ElasticState`` on its own: what it takes, without ranks that die."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import asyncddp as bf
from tests.support.loops import each, on_each_rank


class OnlySaved:
    """An object whose state nobody can load."""

    def state_dict(self):
        return {}


WRONG = {
    "model": (
        lambda model, sgd: bf.ElasticState(sgd, model),
        "ElasticState: argument model: expected a torch.nn.Module, got SGD; give the model "
        "first, its optimizer second, and others by name, such as scheduler=",
    ),
    "optimizer": (
        lambda model, sgd: bf.ElasticState(model, torch.optim.lr_scheduler.StepLR(sgd, 1)),
        "ElasticState: argument optimizer: expected a torch.optim.Optimizer, got StepLR; "
        "give the model first, its optimizer second, and others by name, such as scheduler=",
    ),
    "scheduler": (
        lambda model, sgd: bf.ElasticState(model, sgd, scheduler=OnlySaved()),
        "ElasticState: argument scheduler: expected an object with state_dict() and "
        "load_state_dict(), got OnlySaved without load_state_dict(); add what it lacks, or leave "
        "it out",
    ),
    "a part": (
        lambda model, sgd: bf.ElasticState(model, sgd, seed=None),
        "ElasticState: argument seed: expected an object with state_dict() and load_state_dict(), "
        "got NoneType without state_dict() and load_state_dict(); add what it lacks, or leave it",
    ),
}


@on_each_rank(ranks=2)
@each("name", list(WRONG))
def test_objects_of_a_wrong_kind_are_refused(name):
    """Each rank that gives one is told at once, before a replacement needs it."""
    call, words = WRONG[name]
    model = torch.nn.Linear(2, 1)
    with pytest.raises(bf.ArgumentError) as caught:
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert str(caught.value).startswith(words)


class Asked(torch.nn.Linear):
    """A model that counts how often it is asked for its averaging."""

    asked = 0

    @property
    def _averager(self):
        self.asked += 1


@on_each_rank(ranks=2, settings={"elastic": True})
def test_nobody_asks_for_reasons_to_refuse_while_nobody_would_join():
    """Steps cost nothing for them, and the engine, which may ask, keeps no state alive."""
    model, engine = Asked(2, 1), bf.current().engine
    state = bf.ElasticState(model)
    assert list(state.steps(3)) == [0, 1, 2]
    assert model.asked == 0
    bf.win_create(torch.zeros(2), "mine")
    assert engine.refusal() == "no rank can join while there are windows: 'mine'"
    bf.win_free("mine")
    assert (engine.refusal(), model.asked) == ("", 1)
    kept = weakref.ref(state)
    del state
    gc.collect()
    assert (kept(), engine.refusal()) == (None, "")


def test_a_rank_that_has_left_calls_no_collectives():
    """It says so, and the others are not disturbed."""

    def train():
        state = bf.ElasticState(torch.nn.Linear(2, 1))
        for step in state.steps(12):
            if step == 5 and bf.rank() == 1:
                state.leave()
            bf.allreduce(torch.ones(1))
        return [told(verb) for verb in (bf.allreduce, bf.local_allreduce)] if state.left else step

    def told(verb):
        with pytest.raises(bf.UsageError) as raised:
            verb(torch.ones(1))
        return str(raised.value)

    with bf.local_world(3, elastic=True) as world:
        first, errors, last = world.run(train)
    assert (first, last) == (11, 11)
    assert errors == [
        f"rank 1: {verb}: this rank has left the run, in which others go on (ranks 0, 2); end its "
        "process once state.left is True"
        for verb in ("allreduce", "local_allreduce")
    ]
