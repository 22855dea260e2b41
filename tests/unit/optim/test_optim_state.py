"""Checkpoints, and equal starts: state dicts, broadcast of parameters and state, averages."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.unit.optim.optim_reference import (
    METHODS,
    assign,
    batch,
    filled,
    mlp,
    square_loss,
    vector,
)

pytestmark = pytest.mark.training

RANKS = 4
GRAPH = topology.one_peer_exponential(RANKS)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.AdamW, lr=0.01, amsgrad=True)


def made(method, make, every=1):
    model = mlp(0 if method == "gradient_allreduce" else bf.rank())
    optimizer = bf.DistributedOptimizer(
        make(model.parameters()),
        model,
        method,
        topology=GRAPH,
        num_steps_per_communication=every,
        broadcast=False,
    )
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), step)).backward()
        optimizer.step()


# checkpoints


def test_a_checkpoint_in_the_middle_of_a_step():
    """A round that is under way when the state is replaced is dropped on all ranks alike."""

    def case():
        model, optimizer = made("adapt_with_combine", sgd)
        train(model, optimizer, range(2))
        saved, kept = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        model(batch(bf.rank(), 2))  # starts a round
        model.load_state_dict(kept)
        optimizer.load_state_dict(saved)
        assert optimizer.round == 2
        train(model, optimizer, range(2, 4))
        return vector(model)

    def whole():
        model, optimizer = made("adapt_with_combine", sgd)
        train(model, optimizer, range(4))
        return vector(model)

    got, expected = LoopbackWorld(RANKS).run(case), LoopbackWorld(RANKS).run(whole)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("method", METHODS)
def test_state_dicts_of_plain_optimizers(method):
    """The wrapper reads a plain state dict, a plain optimizer reads the wrapper's."""

    def case():
        model, optimizer = made(method, sgd)
        plain_model = mlp(7)
        plain = sgd(plain_model.parameters())
        square_loss(plain_model, batch(0, 0)).backward()
        plain.step()
        train(model, optimizer, range(2))
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.round == 0
        first = model[0].weight
        kept = plain.state[plain_model[0].weight]["momentum_buffer"]
        assert torch.equal(optimizer.state[first]["momentum_buffer"], kept)
        train(model, optimizer, range(2))
        plain.load_state_dict(optimizer.state_dict())
        assert torch.equal(
            plain.state[plain_model[0].weight]["momentum_buffer"],
            optimizer.state[first]["momentum_buffer"],
        )

    LoopbackWorld(RANKS).run(case)


def test_wrapping_carries_the_state_over():
    """Momentum that the plain optimizer has gathered goes on in the wrapper."""

    def case():
        model = mlp(bf.rank())
        plain = sgd(model.parameters())
        square_loss(model, batch(bf.rank(), 0)).backward()
        plain.step()
        buffer = plain.state[model[0].weight]["momentum_buffer"]
        optimizer = bf.DistributedOptimizer(plain, model, topology=GRAPH, broadcast=False)
        assert optimizer.state[model[0].weight]["momentum_buffer"] is buffer

    LoopbackWorld(RANKS).run(case)


def test_what_only_the_wrapped_optimizer_has():
    """Methods of special optimizers are reached through the wrapper; typing errors are not."""

    class ScheduleFree(torch.optim.SGD):
        mode = "train"

        def eval(self):
            self.mode = "eval"

    def case():
        model = mlp(0)
        plain = ScheduleFree(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model)
        optimizer.eval()
        assert plain.mode == "eval"
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = optimizer.no_such_thing

    LoopbackWorld(2).run(case)


# broadcast_optimizer_state


def trained(make, rank, closure=False):
    model = mlp(rank)
    optimizer = make(model.parameters())

    def evaluate():
        optimizer.zero_grad()
        loss = square_loss(model, batch(rank, 0))
        loss.backward()
        return loss

    for _ in range(rank + 1):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    return model, optimizer


def flattened(value, path=()):
    """Every leaf of a state with its place."""
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in flattened(v, (*path, k))]
    if isinstance(value, (list, tuple)):
        kind = type(value).__name__
        return [leaf for i, v in enumerate(value) for leaf in flattened(v, (*path, kind, i))]
    return [(path, value)]


def assert_same_state(state, expected):
    ours, theirs = flattened(state), flattened(expected)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        assert type(one) is type(other), path
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, path
            assert torch.equal(one, other), path
        else:
            assert one == other or (one != one and other != other), path


@pytest.mark.parametrize(
    ("make", "closure"),
    [
        (sgd, False),
        (adam, False),
        (partial(torch.optim.LBFGS, max_iter=3), True),
        (partial(torch.optim.Adam, lr=torch.tensor(0.1)), False),
        (partial(torch.optim.ASGD, lr=0.1), False),
    ],
    ids=["SGD", "AdamW", "LBFGS", "tensor lr", "ASGD"],
)
@pytest.mark.parametrize("root", [0, 2])
def test_the_roots_state_everywhere(make, closure, root):
    """Options and state equal the root's, exactly; no parameter moves, no step is made."""

    def case():
        model, optimizer = trained(make, bf.rank(), closure)
        optimizer.param_groups[0]["lr"] *= 0.1 * (1 + bf.rank())
        before = vector(model)
        bf.broadcast_optimizer_state(optimizer, root)
        assert torch.equal(before, vector(model))
        return optimizer.state_dict()

    states = LoopbackWorld(RANKS).run(case)
    for state in states:
        assert_same_state(state, states[root])
    assert flattened(states[root]["state"]), "the root has no state: the test shows nothing"


def test_states_that_only_one_side_has():
    """Empty state is filled from the root, and state that the root does not have is dropped."""

    def case(root):
        model, optimizer = trained(adam, 1) if bf.rank() == 0 else (mlp(1), None)
        optimizer = optimizer or adam(model.parameters(), weight_decay=0.5)
        bf.broadcast_optimizer_state(optimizer, root)
        return len(optimizer.state), optimizer.param_groups[0]["weight_decay"]

    assert LoopbackWorld(2).run(case, 0) == [(4, 0.01)] * 2
    assert LoopbackWorld(2).run(case, 1) == [(0, 0.5)] * 2


def test_scalars_none_and_nesting_arrive_exactly():
    """0.1 is 0.1 and not 0.10000000149; tuples stay tuples; tensors are written in place."""

    class Strange(torch.optim.SGD):
        pass

    def case():
        weight = nn.Parameter(torch.zeros(2))
        optimizer = Strange([weight], lr=0.1 if bf.rank() == 0 else 9.0)
        mine = bf.rank() == 0
        kept = torch.full((3,), float(bf.rank()))
        optimizer.state[weight] = {
            "pair": (kept, [None, 1 / 3 if mine else 0.0]),
            "count": 2**60 + 1 if mine else 0,
            "nan": math.nan,
        }
        optimizer.state["global"] = {"note": "hello"} if mine else {}
        bf.broadcast_optimizer_state(optimizer)
        state = optimizer.state[weight]
        assert state["pair"][0] is kept
        return optimizer.param_groups[0]["lr"], state, optimizer.state["global"]

    first, second = LoopbackWorld(2).run(case)
    assert_same_state(second, first)
    assert second[0] == 0.1
    assert second[1]["pair"][1] == [None, 1 / 3]
    assert second[2] == {"note": "hello"}


def test_the_wrappers_counters_come_along():
    """A rank that joins with a root's state is in the root's round."""

    def case():
        model, optimizer = made("adapt_then_combine", sgd)
        train(model, optimizer, range(3))
        if bf.rank() != 0:
            optimizer.load_state_dict(sgd(mlp(0).parameters()).state_dict())
        bf.broadcast_optimizer_state(optimizer)
        return optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [3] * RANKS


def test_groups_that_differ_are_refused():
    """On all ranks; the message names the parameters that are not in the same group everywhere."""

    def case():
        model = mlp(0)
        parameters = list(model.parameters())
        optimizer = sgd(parameters if bf.rank() == 0 else parameters[:2])
        bf.broadcast_optimizer_state(optimizer)

    lacks = "rank 0 has parameter 2 of group 0, parameter 3 of group 0, which rank 1 has not"
    for outcome in LoopbackWorld(2).outcomes(case):
        assert outcome.error == "MismatchError"
        assert lacks in outcome.message

    def no_optimizer():
        with pytest.raises(bf.ArgumentError, match=r"expected a torch\.optim\.Optimizer, got dict"):
            bf.broadcast_optimizer_state({})

    LoopbackWorld(2).run(no_optimizer)


# parameters


def normalised(rank):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    filled(model, rank)
    model[1].running_mean.fill_(rank)
    model[1].num_batches_tracked.fill_(rank * 10)
    return model


FORMS = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: model.named_parameters(),
    "list": lambda model: list(model.parameters()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("root", [0, 3])
def test_broadcast_parameters(form, root):
    """All forms that users have at hand; a module and a state dict with their buffers."""

    def case():
        model = normalised(bf.rank())
        bf.broadcast_parameters(FORMS[form](model), root_rank=root)
        return vector(model), model[1].running_mean.clone(), int(model[1].num_batches_tracked)

    results = LoopbackWorld(RANKS).run(case)
    expected = vector(normalised(root))
    for rank, (parameters, mean, count) in enumerate(results):
        assert torch.equal(parameters, expected)
        source = root if form in ("module", "state_dict") else rank
        assert mean.tolist() == [source] * 3
        assert count == source * 10


@pytest.mark.parametrize("form", FORMS)
def test_allreduce_parameters(form):
    """The mean in place; integers stay as they are unless asked for."""

    def case(**options):
        model = normalised(bf.rank())
        bf.allreduce_parameters(FORMS[form](model), **options)
        return vector(model), model[1].running_mean.clone(), int(model[1].num_batches_tracked)

    expected = torch.stack([vector(normalised(rank)) for rank in range(RANKS)]).mean(dim=0)
    for rank, (parameters, mean, count) in enumerate(LoopbackWorld(RANKS).run(case)):
        torch.testing.assert_close(parameters, expected)
        assert mean.tolist() == [1.5 if form in ("module", "state_dict") else rank] * 3
        assert count == rank * 10
    if form == "state_dict":
        counts = [n for _, _, n in LoopbackWorld(RANKS).run(partial(case, round_integers=True))]
        assert counts == [15] * RANKS


def test_an_empty_list_and_wrong_things():
    """Nothing to send is fine; a number among the tensors is named."""

    def case():
        bf.broadcast_parameters([])
        bf.allreduce_parameters({})
        for verb in (bf.broadcast_parameters, bf.allreduce_parameters):
            with pytest.raises(bf.ArgumentError, match="expected a tensor as entry step, got int"):
                verb({"step": 3})
            with pytest.raises(bf.ArgumentError, match="got Tensor"):
                verb(torch.zeros(2))
            with pytest.raises(bf.ArgumentError, match="got int"):
                verb(3)

    LoopbackWorld(2).run(case)


# averages


def test_consensus_distance_is_its_formula():
    """sqrt(1/n Σ ‖x_i − x̄‖²), in float64 whatever the dtype, and the same on all ranks."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):

        def case(dtype=dtype):
            model = [p.detach().to(dtype) for p in mlp(bf.rank()).parameters()]
            return bf.consensus_distance(model), torch.cat([p.reshape(-1) for p in model])

        results = LoopbackWorld(RANKS).run(case)
        x = torch.stack(
            [v.to(torch.complex128 if dtype.is_complex else torch.float64) for _, v in results]
        )
        expected = float(((x - x.mean(dim=0)).abs() ** 2).sum(dim=1).mean().sqrt())
        assert [distance for distance, _ in results] == pytest.approx([expected] * RANKS, rel=1e-9)
        assert expected > 0.5

    def agreed():
        return bf.consensus_distance(mlp(0))

    assert LoopbackWorld(RANKS).run(agreed) == pytest.approx([0.0] * RANKS, abs=1e-15)

    def wrong():
        with pytest.raises(bf.ArgumentError, match="expected a module with parameters"):
            bf.consensus_distance(nn.Tanh())

    LoopbackWorld(1).run(wrong)


@pytest.mark.parametrize("buffers", [None, False, True])
def test_average_model_lends_the_average(buffers):
    """Inside the average, with buffers unless told not to; afterwards each rank's own again."""
    options = {} if buffers is None else {"buffers": buffers}

    def case():
        model = normalised(bf.rank())
        own = vector(model)
        with bf.average_model(model, **options) as lent:
            assert lent is model
            inside, mean = vector(model), model[1].running_mean.clone()
            count = int(model[1].num_batches_tracked)
        assert torch.equal(vector(model), own)
        assert model[1].running_mean.tolist() == [bf.rank()] * 3
        assert count == bf.rank() * 10
        return inside, mean.tolist()

    expected = torch.stack([vector(normalised(rank)) for rank in range(RANKS)]).mean(dim=0)
    for rank, (inside, mean) in enumerate(LoopbackWorld(RANKS).run(case)):
        torch.testing.assert_close(inside, expected)
        assert mean == [rank if buffers is False else 1.5] * 3


def test_averaged_statistics_are_those_of_all_data_together():
    """v = 1/n Σ (v_j + (m_j − m)²), however far the means are from zero; the count stays."""
    means = [1000.0, 1000.5, 999.5, 1001.0]

    def case():
        model = nn.Sequential(nn.BatchNorm1d(1), nn.InstanceNorm1d(1, track_running_stats=True))
        for norm in model:
            norm.running_mean.fill_(means[bf.rank()])
            norm.running_var.fill_(0.5 + bf.rank())
        with bf.average_model(model):
            inside = [(norm.running_mean.item(), norm.running_var.item()) for norm in model]
        return inside, model[0].running_var.item()

    mean = sum(means) / RANKS
    variance = sum(0.5 + r + (means[r] - mean) ** 2 for r in range(RANKS)) / RANKS
    for rank, (inside, own) in enumerate(LoopbackWorld(RANKS).run(case)):
        assert inside == [pytest.approx((mean, variance), rel=1e-6)] * 2
        assert own == 0.5 + rank


@pytest.mark.parametrize("buffers", [False, True])
def test_statistics_estimated_anew_stay_in_the_block(buffers):
    """``update_bn`` in the block gives what plain torch does on the average model; then it is gone.

    That includes the count of batches, an integer, and buffers that were not averaged.
    """
    data = [batch(rank, 0).float() for rank in range(RANKS)]

    def case():
        model = normalised(bf.rank())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with bf.average_model(model, buffers=buffers):
            torch.optim.swa_utils.update_bn(data, model)
            inside = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return inside

    plain = normalised(0)
    assign(plain, torch.stack([vector(normalised(rank)) for rank in range(RANKS)]).mean(dim=0))
    torch.optim.swa_utils.update_bn(data, plain)
    for inside in LoopbackWorld(RANKS).run(case):
        torch.testing.assert_close(inside, dict(plain.state_dict()))


def test_average_model_leaves_what_has_no_average():
    """Integer parameters, as of quantised layers, and sparse buffers stay each rank's own."""

    def case():
        model = mlp(bf.rank())
        model.register_parameter("codes", nn.Parameter(torch.full((2,), bf.rank()), False))
        model.register_buffer("edges", torch.eye(3).mul(bf.rank() + 1).to_sparse())
        with bf.average_model(model):
            return model.codes.tolist(), model.edges.to_dense().max().item()

    assert LoopbackWorld(RANKS).run(case) == [([r, r], r + 1) for r in range(RANKS)]


def test_average_model_gives_back_after_an_exception():
    """On the rank that raised, without the others' help."""

    def case():
        model = mlp(bf.rank())
        own = vector(model)

        def evaluate():
            with bf.average_model(model):
                if bf.rank() == 1:
                    raise KeyError("evaluation failed")

        if bf.rank() == 1:
            with pytest.raises(KeyError):
                evaluate()
        else:
            evaluate()
        assert torch.equal(vector(model), own)
        return bf.allreduce(torch.ones(1)).item()

    assert LoopbackWorld(RANKS).run(case) == [1.0] * RANKS


@pytest.mark.parametrize("method", METHODS)
def test_average_model_in_the_middle_of_training(method):
    """Between forward and step(), while messages read the parameters, nothing is disturbed."""

    def case(evaluates):
        model, optimizer = made(method, sgd)
        for step in range(4):
            optimizer.zero_grad()
            loss = square_loss(model, batch(bf.rank(), step))
            if evaluates:
                with bf.average_model(model), torch.no_grad():
                    model(batch(0, 0))
            loss.backward()
            optimizer.step()
        return vector(model)

    disturbed = LoopbackWorld(RANKS).run(case, True)
    assert all(map(torch.equal, disturbed, LoopbackWorld(RANKS).run(case, False)))


@pytest.mark.parametrize("method", METHODS)
def test_a_training_pass_of_the_average_is_no_round(method):
    """A forward pass for gradients inside the block sends nothing of what is lent."""

    def case(evaluates):
        model, optimizer = made(method, sgd)
        for step in range(3):
            if evaluates:
                with bf.average_model(model):
                    square_loss(model.train(), batch(0, 0))
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            optimizer.step()
        return vector(model)

    disturbed = LoopbackWorld(RANKS).run(case, True)
    assert all(map(torch.equal, disturbed, LoopbackWorld(RANKS).run(case, False)))


def test_average_model_wants_a_module():
    """Words for a list of tensors."""

    def case():
        with pytest.raises(bf.ArgumentError, match=r"expected a torch\.nn\.Module, got list"):
            bf.average_model([torch.zeros(1)])

    LoopbackWorld(1).run(case)
