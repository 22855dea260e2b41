"""``ElasticState`` on its own: what it takes, without ranks that die."""

from __future__ import annotations

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
