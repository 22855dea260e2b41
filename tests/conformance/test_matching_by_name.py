"""Parameters, buffers and optimizer state meet under their names, in whatever order they are.

Where names, shapes or dtypes differ, all ranks raise, and the message names what differs.
"""

from __future__ import annotations

import re

import pytest
import torch

import asyncddp as bf
from tests.support import WORLDS, on

SEVERAL = on(
    *(name for name, (transport, size) in WORLDS.items() if transport != "mpi" and size == 2)
)


class Model(torch.nn.Module):
    """Two layers of one shape and two buffers, made in an order of the rank's own."""

    def __init__(self, value, *, turned, extra=False):
        super().__init__()
        for name in ("second", "first") if turned else ("first", "second"):
            layer = torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.constant_(layer.weight, value + (name == "second"))
            setattr(self, name, layer)
            self.register_buffer(f"{name}_mean", torch.full((2,), value - 10 * (name == "first")))
        if extra:
            self.third = torch.nn.Linear(1, 1)

    def values(self):
        return {name: float(one.mean()) for name, one in self.state_dict().items()}


def own_model(**options):
    return Model(float(bf.rank()), turned=bf.rank() == 1, **options)


def broadcast(form):
    model = own_model()
    bf.broadcast_parameters(FORMS[form](model))
    return model.values()


def averaged(form):
    model = own_model()
    bf.allreduce_parameters(FORMS[form](model))
    return model.values()


FORMS = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
    "pairs": lambda model: [*model.named_parameters(), *model.named_buffers()],
}
ROOTS = {"first.weight": 0.0, "first_mean": -10.0, "second.weight": 1.0, "second_mean": 0.0}
MEANS = {name: value + 0.5 for name, value in ROOTS.items()}


@SEVERAL
@pytest.mark.parametrize("form", FORMS)
def test_modules_of_another_order_get_the_values_of_the_same_name(world, form):
    """Modules, state dicts and pairs match by name, whatever each rank's order."""
    assert world.run(broadcast, form) == [ROOTS] * 2
    assert world.run(averaged, form) == [MEANS] * 2


def lent():
    model = own_model()
    with bf.average_model(model, buffers=True) as shown:
        return shown.values(), bf.consensus_distance(model)


def test_averages_and_distances_go_by_name_too():
    """average_model and consensus_distance pair parameters and buffers by name."""
    with bf.local_world(2) as world:
        assert world.run(lent) == [(MEANS, 0.0)] * 2


def test_the_start_of_a_wrapped_model_goes_by_name():
    """Buffers and frozen parameters as well; the order of trained ones makes the buckets."""

    def case():
        model = own_model().requires_grad_(False)
        model.head = torch.nn.Linear(2, 1)
        bf.DecentralizedDataParallel(model, optim_fn=lambda ps: torch.optim.SGD(ps, lr=0.1))
        return {name: value for name, value in model.values().items() if name in ROOTS}

    with bf.local_world(2) as world:
        assert world.run(case) == [ROOTS] * 2


def state_of(model, optimizer):
    named = {id(one): name for name, one in model.named_parameters()}
    return {
        named[id(one)]: float(s["momentum_buffer"].mean()) for one, s in optimizer.state.items()
    }


def optimizer_state():
    model = own_model()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1 + bf.rank(), momentum=0.9)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, bf.rank() * 100 + (name == "second.weight"))
    optimizer.step()
    bf.broadcast_optimizer_state(optimizer)
    names = optimizer.param_groups[0]["param_names"]
    return state_of(model, optimizer), optimizer.param_groups[0]["lr"], names


@SEVERAL
def test_state_of_an_optimizer_with_names_goes_by_name(world):
    """Each rank gets rank 0's state and learning rate, and keeps its own parameter order."""
    found = world.run(optimizer_state)
    state = {"first.weight": 0.0, "second.weight": 1.0}
    assert found[0] == (state, 0.1, ["first.weight", "second.weight"])
    assert found[1] == (state, 0.1, ["second.weight", "first.weight"])


# what does not fit


def lacking(verb):
    VERBS[verb](own_model(extra=bf.rank() == 1))


def of_another_shape(verb):
    model = own_model()
    if bf.rank() == 1:
        model.first.weight = torch.nn.Parameter(torch.ones(2, 3))
    VERBS[verb](model)


def _optimizer(model):
    return torch.optim.SGD(model.named_parameters(), lr=0.1)


def _lend(model):
    with bf.average_model(model):
        pytest.fail("the models differ")


VERBS = {
    "broadcast_parameters": bf.broadcast_parameters,
    "allreduce_parameters": bf.allreduce_parameters,
    "average_model": _lend,
    "consensus_distance": bf.consensus_distance,
    "broadcast_optimizer_state": lambda model: bf.broadcast_optimizer_state(_optimizer(model)),
}


@SEVERAL
def test_other_names_and_shapes_are_refused_on_all_ranks(world):
    """A name or shape that differs on one rank raises MismatchError that tells it."""
    for case, problem in [
        (lacking, r"rank 1 has .*third\.bias.*, which rank 0 has not"),
        (
            of_another_shape,
            r"first\.weight.* is float32 of shape \(2, 2\) on rank 0 and .*\(2, 3\)",
        ),
    ]:
        for verb in VERBS:
            for rank, outcome in enumerate(world.outcomes(case, verb)):
                assert outcome.error == "MismatchError", outcome
                assert f"rank {rank}: {verb} needs tensors of the same names" in outcome.message
                assert re.search(problem, outcome.message), outcome.message


def test_a_list_of_many_differences_is_short():
    """The error about 99 missing tensors names five of them and counts the others."""

    def case():
        names = [f"layer{k}.weight" for k in range(100 if bf.rank() else 1)]
        bf.broadcast_parameters({name: torch.zeros(1) for name in names})

    with bf.local_world(2) as world, pytest.raises(bf.RankError) as raised:
        world.run(case)
    assert "layer13.weight and 94 more, which rank 0 has not" in str(raised.value)


def test_tensors_without_names_go_by_their_place():
    """Unnamed tensors match by position; another order raises MismatchError."""

    def case():
        a, b = torch.full((2,), float(bf.rank())), torch.full((3,), float(bf.rank()))
        bf.broadcast_parameters([a, b, a], root_rank=1)
        try:
            bf.broadcast_parameters([a, b] if bf.rank() else [b, a])
        except bf.MismatchError as error:
            return a.tolist(), b.tolist(), "tensor 0 is float32 of shape (3,)" in str(error)

    with bf.local_world(2) as world:
        assert world.run(case) == [([1.0, 1.0], [1.0, 1.0, 1.0], True)] * 2


def test_two_tensors_of_one_name_are_a_mistake():
    """broadcast_parameters refuses pairs in which a name occurs twice, and tells the name."""
    with bf.local_world(1) as world, pytest.raises(bf.RankError) as raised:
        world.run(lambda: bf.broadcast_parameters([("w", torch.zeros(1)), ("w", torch.zeros(1))]))
    assert "two tensors have the name w; give each its own" in str(raised.value)
