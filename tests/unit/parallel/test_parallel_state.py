"""The average model, and runs that are interrupted and resumed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.unit.parallel.parallel_reference import (
    assert_all_close,
    assign,
    convnet,
    image_loss,
    make_ddp,
    mlp,
    of_batch,
    simulate,
    vector,
)

pytestmark = pytest.mark.training

GRAPH = topology.one_peer_exponential(4)
RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
many_buckets = {"bucket_size_in_mb": 1e-5}
every_layout = pytest.mark.parametrize(
    "options",
    [{}, many_buckets, {"param_as_bucket_view": False}],
    ids=["one bucket", "many buckets", "copied"],
)


# the average model


@every_layout
@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_average_of_all_ranks_and_on(after, options):
    """``global_avg`` gives the mean, at any time; momentum and rounds go on from there."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH, **options)
        before = mean = None
        for step in range(6):
            if step == after:
                before = vector(model)
                ddp.global_avg()
                mean = vector(model)
            of_batch(ddp, bf.rank(), step).backward()
        return before, mean, vector(model), ddp.steps

    def averaged(step, models):
        if step == after:
            mean = torch.stack([vector(model) for model in models]).mean(0)
            for model in models:
                assign(model, mean)

    before, mean, last, steps = zip(*LoopbackWorld(RANKS).run(case), strict=True)
    assert_all_close(mean, [torch.stack(before).mean(0)] * RANKS)
    assert_all_close(last, simulate(GRAPH, sgd, 6, before=averaged))
    assert steps == (6,) * RANKS


@pytest.mark.parametrize("buffers", [False, True])
def test_buffers_where_they_are_asked_for(buffers):
    """Statistics of batch normalisation are averaged or each rank's own; counts are never."""

    def case():
        model = convnet(bf.rank())
        ddp = make_ddp(model, sgd, sync_buffer_in_global_avg=buffers)
        for step in range(1 + bf.rank()):
            with torch.no_grad():
                image_loss(ddp, bf.rank(), step)
        own = model[1].running_mean.clone()
        ddp.eval()
        lent = model[1].running_mean.clone()
        ddp.train()
        assert torch.equal(model[1].running_mean, own)
        ddp.global_avg()
        return own, lent, model[1].running_mean, int(model[1].num_batches_tracked)

    own, lent, kept, counts = zip(*LoopbackWorld(RANKS).run(case), strict=True)
    expected = [torch.stack(own).mean(0)] * RANKS if buffers else own
    assert_all_close(lent, expected)
    assert_all_close(kept, expected)
    assert counts == (1, 2, 3, 4)


@every_layout
def test_evaluation_shows_the_average_and_leaves_no_trace(options):
    """The run goes on to the bit as if there had been no evaluation."""

    def case(evaluates):
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH, **options)
        seen = []
        for step in range(6):
            if evaluates and step in (0, 1, 4):
                before = vector(model)
                assert ddp.eval().training is model.training is False
                assert ddp.eval() is ddp
                seen.append((before, vector(model), torch.cat(flat(ddp.state_dict()))))
                assert ddp.train().training is model.training is True
                assert torch.equal(vector(model), before)
            of_batch(ddp, bf.rank(), step).backward()
        return vector(model), seen

    def flat(state):
        return [value.reshape(-1) for value in state.values()]

    with_it = LoopbackWorld(RANKS).run(case, True)
    without = LoopbackWorld(RANKS).run(case, False)
    for (one, _), (other, _) in zip(with_it, without, strict=True):
        assert torch.equal(one, other)
    for looks in zip(*(seen for _, seen in with_it), strict=True):
        mean = torch.stack([before for before, _, _ in looks]).mean(0)
        assert_all_close([lent for _, lent, _ in looks], [mean] * RANKS)
        assert_all_close([state for _, _, state in looks], [mean] * RANKS)


def test_global_avg_during_evaluation():
    """The average that is shown becomes everybody's own."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH)
        of_batch(ddp, bf.rank(), 0).backward()
        ddp.eval()
        shown = vector(model)
        ddp.global_avg()
        ddp.train()
        return shown, vector(model)

    shown, own = zip(*LoopbackWorld(RANKS).run(case), strict=True)
    assert_all_close(shown, own)


@every_layout
def test_average_model_waits_for_what_is_under_way(options):
    """The function for any model lends this one's average as well, and leaves no trace."""

    def case(evaluates):
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH, **options)
        for step in range(4):
            of_batch(ddp, bf.rank(), step).backward()
            if evaluates:
                with bf.average_model(model):
                    assert bf.consensus_distance(model) < 1e-12
        return vector(model)

    with_it = LoopbackWorld(RANKS).run(case, True)
    without = LoopbackWorld(RANKS).run(case, False)
    assert all(map(torch.equal, with_it, without))


def test_another_wrapper_of_the_same_model_takes_over():
    """The earlier one hears of no backward pass any more."""

    def case():
        model = mlp(bf.rank())
        first = make_ddp(model, sgd, topology=GRAPH)
        of_batch(first, bf.rank(), 0).backward()
        first.close()
        second = make_ddp(model, sgd, topology=GRAPH)
        third = make_ddp(model, sgd, topology=GRAPH)
        of_batch(third, bf.rank(), 0).backward()
        return first.steps, second.steps, third.steps

    assert LoopbackWorld(RANKS).run(case) == [(1, 0, 1)] * RANKS


# resuming


def adamw(named):
    """Weight decay for weights alone, in two groups, one of which may be empty."""
    groups = [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def warmup(optimizer):
    """A schedule of schedules."""
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, milestones=[3])


def stairs(optimizer):
    """A schedule by a function."""
    return LambdaLR(optimizer, lambda step: 0.7**step)


def new_run(scheduler, rank, **options):
    """A model and its wrapper."""
    model, graph = mlp(rank), topology.one_peer_exponential(bf.size())
    ddp = bf.DecentralizedDataParallel(
        model, adamw, scheduler, topology=graph, broadcast=False, **options
    )
    return model, ddp


def interrupted(scheduler, stop, first, then, sync=True, late=False):
    """Train, save, and go on with a new wrapper of a new model; ``late``: load after a step."""
    model, ddp = new_run(scheduler, bf.rank(), sync=sync, **first)
    for step in range(stop):
        of_batch(ddp, bf.rank(), step).backward()
        bf.barrier()
    saved = copy.deepcopy((ddp.state_dict(), ddp.optim_state_dict()))
    ddp.close()
    model, ddp = new_run(scheduler, 10 + bf.rank(), sync=sync, **then)
    if late:
        of_batch(ddp, bf.rank(), 0).backward()
    ddp.load_state_dict(saved[0])
    ddp.load_optim_state_dict(saved[1])
    assert ddp.steps == stop
    for step in range(stop, 8):
        of_batch(ddp, bf.rank(), step).backward()
        bf.barrier()
    return vector(model), [one.get_last_lr() for one in ddp.lr_schedulers]


def uninterrupted(scheduler, **options):
    """The same without the interruption."""
    model, ddp = new_run(scheduler, bf.rank(), **options)
    for step in range(8):
        of_batch(ddp, bf.rank(), step).backward()
        bf.barrier()
    return vector(model), [one.get_last_lr() for one in ddp.lr_schedulers]


@pytest.mark.parametrize("scheduler", [None, warmup, stairs])
@pytest.mark.parametrize("options", [{}, many_buckets, {"param_as_bucket_view": False}])
@pytest.mark.parametrize("late", [False, True], ids=["before the first pass", "after it"])
def test_a_resumed_run_is_the_same_run(scheduler, options, late):
    """To the bit, with messages under way when it was saved."""
    got = LoopbackWorld(RANKS).run(interrupted, scheduler, 5, options, options, late=late)
    expected = LoopbackWorld(RANKS).run(uninterrupted, scheduler, **options)
    for (values, rates), (others, their_rates) in zip(got, expected, strict=True):
        assert torch.equal(values, others)
        assert rates == their_rates


@pytest.mark.parametrize("scheduler", [warmup, stairs])
@pytest.mark.parametrize("first", [{}, many_buckets])
def test_a_run_resumed_with_other_buckets(scheduler, first):
    """State goes by the parameters' names, learning rates by their groups."""
    then = {} if first else many_buckets
    got = LoopbackWorld(RANKS).run(interrupted, scheduler, 4, first, then)
    expected = LoopbackWorld(RANKS).run(uninterrupted, scheduler, **then)
    assert_all_close([values for values, _ in got], [values for values, _ in expected])
    assert [rates for _, rates in got] == [rates for _, rates in expected]


def test_an_asynchronous_run_resumed_in_lockstep():
    """What the neighbours see is the loaded model before anybody goes on."""
    got = LoopbackWorld(RANKS).run(interrupted, warmup, 5, {}, {}, sync=False)
    expected = LoopbackWorld(RANKS).run(uninterrupted, warmup)
    assert_all_close([values for values, _ in got], [values for values, _ in expected])


def test_the_state_before_the_first_pass():
    """Nothing to save, or what was loaded."""

    def case():
        _, ddp = new_run(warmup, bf.rank())
        empty = ddp.optim_state_dict()
        of_batch(ddp, bf.rank(), 0).backward()
        saved = copy.deepcopy(ddp.optim_state_dict())
        _, other = new_run(warmup, bf.rank())
        other.load_optim_state_dict(saved)
        return empty, other.optim_state_dict() is saved, sorted(saved["state"])

    nothing = {"step": 0, "state": {}, "options": {}, "schedulers": {}}
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert LoopbackWorld(2).run(case) == [(nothing, True, names)] * 2


def test_states_of_something_else():
    """Told with what was expected; nothing has changed."""

    def case():
        model, ddp = new_run(None, 0)
        for wrong in ({}, [], torch.optim.SGD(model.parameters(), lr=0.1).state_dict()):
            with pytest.raises(bf.ArgumentError, match=r"expected what optim_state_dict\(\) of a"):
                ddp.load_optim_state_dict(wrong)
        state = {"step": 1, "state": {}, "options": {"9.weight": {}}, "schedulers": {}}
        with pytest.raises(bf.ArgumentError, match=r"it has parameter 9\.weight, which the model"):
            ddp.load_optim_state_dict(state)
        with pytest.raises(bf.ArgumentError, match="assign: expected False, since parameters live"):
            ddp.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(RuntimeError, match="Missing key"):
            ddp.load_state_dict({})
        return ddp.steps

    assert LoopbackWorld(1).run(case) == [0]
