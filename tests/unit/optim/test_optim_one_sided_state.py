"""Windows of optimizers: when they are made and freed, checkpoints, wrong arguments."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from tests.support import BEFORE_DEADLINE, LoopbackWorld
from tests.unit.optim.optim_reference import batch, mlp, square_loss, vector
from tests.unit.optim.test_optim_one_sided import (
    METHODS,
    RANKS,
    assert_all_close,
    by_matrix,
    every_method,
    graph_of,
    push_by_matrix,
    scalar,
    sgd,
    train,
    unbalanced,
    wrapped,
)

pytestmark = pytest.mark.training

still = partial(torch.optim.SGD, lr=0.0)


# life


def test_windows_have_names_and_end_together():
    """One for each bucket, under the wrapper's label or the prefix; freed by all together."""

    def case():
        models = [mlp(bf.rank()), mlp(bf.rank())]
        wrapped("win_put", models[0])
        second = wrapped("win_put", models[1], window_prefix="mine", bucket_size_in_mb=1e-5)
        both = bf.get_current_created_window_names()
        second.unregister_windows()
        first = bf.get_current_created_window_names()
        second.unregister_windows()  # nothing is left to free
        bf.win_free()
        return both, first, bf.get_current_created_window_names()

    mine = [f"mine.bucket{index}" for index in range(4)]
    expected = (["DistributedOptimizer0.bucket0", *mine], ["DistributedOptimizer0.bucket0"], [])
    assert LoopbackWorld(RANKS).run(case) == [expected] * RANKS


@every_method
@pytest.mark.parametrize("through", ["wrapper", "win_free"])
def test_windows_that_were_freed_are_made_anew(method, through):
    """Training goes on, from z and p = 1, along the topology of then; the rounds count on."""

    def case():
        bf.set_topology(topology.ring(4))
        model = mlp(bf.rank())
        optimizer = wrapped(method, model, topology=None)
        train(model, optimizer, range(2))
        words = "the windows 'DistributedOptimizer0.bucket0'.* lie along the edges of the topology"
        with pytest.raises(topology.TopologyError, match=words):
            bf.set_topology(topology.exponential_two(4))
        if through == "wrapper":
            optimizer.unregister_windows()
        else:
            bf.win_free()
        bf.set_topology(topology.star(4))
        train(model, optimizer, range(2, 4))
        return vector(model), optimizer.round

    def switching(rank, k):
        return topology.as_schedule((topology.ring, topology.star)[k >= 2](4)).neighbors(rank, 0)

    got = LoopbackWorld(RANKS).run(case)
    assert [count for _, count in got] == [4] * RANKS
    assert_all_close(
        [v for v, _ in got],
        by_matrix(method, topology.Schedule("ring, then star", 4, 4, switching), sgd, 4),
    )


def test_a_topology_of_its_own_leaves_the_contexts_free():
    """Windows along the wrapper's own graph do not pin the context's."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("win_put", model, topology=topology.ring(4))
        bf.set_topology(topology.star(4))
        train(model, optimizer, [0])

    LoopbackWorld(RANKS).run(case)


@every_method
def test_a_dropped_wrapper_hangs_nobody(method):
    """One rank drops its wrapper while the others go on with theirs: nothing is collective."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            sgd(model.parameters()), model, method, topology=topology.ring(4)
        )
        train(model, optimizer, range(2))
        bf.barrier()
        if bf.rank() == 0:
            gone = weakref.ref(optimizer)
            gc.disable()
            try:
                del optimizer
                assert gone() is None, "a cycle keeps the wrapper alive"
            finally:
                gc.enable()
            assert not model._forward_pre_hooks
            square_loss(model, batch(0, 0)).backward()
        else:
            train(model, optimizer, range(2, 6))
        bf.barrier()
        return bool(vector(model).isfinite().all())

    assert LoopbackWorld(RANKS).run(case) == [True] * RANKS


def test_communication_may_stop_and_go_on():
    """``empty`` in between: everybody trains alone, and the windows are still there."""

    def case():
        model = scalar()
        optimizer = wrapped("async_model_average", model, still, topology=topology.ring(4))
        values = []
        for communication in ("empty", "win_get", "win_put"):
            optimizer.communication = communication
            nn.init.constant_(model.weight, bf.rank())
            train_one(model, optimizer)
            values.append(model.weight.item())
        return values

    def train_one(model, optimizer):
        optimizer.zero_grad()
        model(torch.zeros(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()

    values = LoopbackWorld(RANKS).run(case)
    ring = [4 / 3, 1.0, 2.0, 5 / 3]
    assert [v[0] for v in values] == [0.0, 1.0, 2.0, 3.0]
    assert [v[1] for v in values] == pytest.approx(ring)
    assert [v[2] for v in values] == pytest.approx(ring)


def test_average_model_in_the_middle_of_a_round():
    """It waits for nobody: what was published is a copy, and z is what is averaged."""

    def case(method):
        model = mlp(bf.rank())
        optimizer = wrapped(method, model)
        train(model, optimizer, range(2))
        own = vector(model)
        loss = square_loss(model, batch(bf.rank(), 2))  # starts a round
        with bf.average_model(model):
            mean = vector(model)
        assert torch.equal(vector(model), own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return own, mean

    for method in ("async_model_average", "push_sum"):
        got = LoopbackWorld(RANKS).run(case, method)
        assert_all_close(
            [mean for _, mean in got], [torch.stack([own for own, _ in got]).mean(dim=0)] * RANKS
        )


# checkpoints


def test_push_sum_goes_on_from_z_with_p_of_1():
    """On an unbalanced graph too: what is loaded is the de-biased model, of equal standing."""

    def before():
        model = mlp(bf.rank())
        optimizer = wrapped("push_sum", model)
        train(model, optimizer, range(3))
        assert optimizer._averager.windows.push_sum_weights() != [1.0]
        return model.state_dict(), optimizer.state_dict()

    def after(states):
        model_state, optimizer_state = states[bf.rank()]
        model = mlp(9)
        optimizer = wrapped("push_sum", model)
        train(model, optimizer, range(2))
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        assert optimizer._averager.windows.push_sum_weights() == [1.0]
        bf.barrier()
        optimizer.state.clear()
        return train(model, optimizer, range(3))

    states = LoopbackWorld(RANKS).run(before)

    def model_of(rank):
        model = mlp(9)
        model.load_state_dict(states[rank][0])
        return model

    got = LoopbackWorld(RANKS).run(after, states)
    assert_all_close(got, push_by_matrix(unbalanced(), sgd, 3, model_of=model_of))


@pytest.mark.parametrize("method", METHODS)
def test_what_was_published_before_loading_is_forgotten(method):
    """A model that was loaded is not mixed with its neighbours' of before."""

    def case():
        model = scalar()
        optimizer = bf.DistributedOptimizer(
            still(model.parameters()), model, method, topology=topology.complete(4)
        )
        state = optimizer.state_dict()
        for _ in range(3):
            optimizer.step()
        bf.barrier()
        nn.init.constant_(model.weight, 7.0)
        optimizer.load_state_dict(state)
        bf.barrier()
        for _ in range(1 + bf.rank()):
            optimizer.step()
        return optimizer.round, model.weight.item()

    got = LoopbackWorld(RANKS).run(case)
    assert [count for count, _ in got] == [1, 2, 3, 4]
    assert [value for _, value in got] == pytest.approx([7.0] * RANKS, rel=1e-12)


def test_state_of_the_root_leaves_p_alone():
    """``broadcast_optimizer_state`` gives counters and state; each p stays its rank's own."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("push_sum", model)
        train(model, optimizer, range(3))
        before = optimizer._averager.windows.push_sum_weights()
        bf.broadcast_optimizer_state(optimizer)
        bf.broadcast_parameters(model)
        assert optimizer._averager.windows.push_sum_weights() == before
        train(model, optimizer, [3])
        return before[0], optimizer._averager.windows.push_sum_weights()[0]

    got = LoopbackWorld(RANKS).run(case)
    assert sum(p for p, _ in got) == pytest.approx(RANKS, rel=1e-14)
    assert sum(p for _, p in got) == pytest.approx(RANKS, rel=1e-14)


# wrong arguments


def test_wrong_arguments_are_refused_in_words():
    """Argument, what was expected, what was got."""

    def case():
        model = mlp(0)
        plain = sgd(model.parameters())
        for options, words in (
            ({"max_staleness": -1}, "max_staleness: expected None or a whole number.* got -1"),
            ({"max_staleness": 1.5}, "max_staleness: .* got 1.5"),
            ({"window_prefix": ""}, "window_prefix: expected a name or None, got ''"),
            (
                {"max_staleness": 2, "algorithm": "adapt_with_combine"},
                "max_staleness: adapt_with_combine has no windows, .* async_model_average, ",
            ),
            (
                {"window_prefix": "a", "algorithm": "gradient_allreduce"},
                "window_prefix: gradient_allreduce has no windows",
            ),
            ({"communication": "allreduce"}, "win_put works with win_put, empty, got 'allreduce'"),
            ({"update_in_backward": True}, "win_put averages before_forward; only"),
            (
                {"topology": topology.matcha(topology.ring(4), 0.5, seed=1)},
                "does not repeat, so that its edges are not known",
            ),
        ):
            with pytest.raises(bf.ArgumentError, match=words):
                bf.DistributedOptimizer(plain, model, **{"algorithm": "win_put", **options})
        wrapped("win_put", model, window_prefix="taken")
        with pytest.raises(bf.ArgumentError, match=r"there is a window 'taken\.bucket0' already"):
            wrapped("win_put", model, window_prefix="taken")
        with pytest.raises(bf.MismatchError, match=r"wrapper 'a0'.*wrapper 'a1'"):
            wrapped("win_put", model, window_prefix=f"a{min(bf.rank(), 1)}")

    LoopbackWorld(RANKS).run(case)


CONSTRUCTORS = {
    bf.DistributedWinPutOptimizer: ("win_put", "win_put"),
    bf.DistributedPullGetOptimizer: ("pull_get", "win_get"),
    bf.DistributedPushSumOptimizer: ("push_sum", "win_accumulate"),
}


@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_the_fields_names(kind):
    """Each thin constructor is the general one with an argument filled in."""

    def case():
        model = mlp(bf.rank())
        plain = sgd(model.parameters())
        optimizer = kind(plain, model, 2, "named", max_staleness=3)
        assert optimizer.wrapped is plain
        assert optimizer.param_groups is plain.param_groups
        assert optimizer.max_staleness == 3
        assert optimizer.force_barrier is False
        counts = ["named.steps"] if kind is bf.DistributedPushSumOptimizer else []
        assert bf.get_current_created_window_names() == ["named.bucket0", *counts]
        optimizer.force_barrier = True
        train(model, optimizer, range(2))
        assert repr(optimizer).startswith(f"{kind.__name__}({optimizer.algorithm}, ")
        return optimizer.algorithm, optimizer.communication, optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [(*CONSTRUCTORS[kind], 1)] * RANKS


@every_method
def test_a_world_ends_with_windows_open(method):
    """Nobody frees them, some ranks are done long before the others: the end is quick and clean."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            sgd(model.parameters()), model, method, topology=graph_of(method)
        )
        time.sleep(0.05 * bf.rank())
        train(model, optimizer, range(2))
        return optimizer.round

    started = time.monotonic()
    assert LoopbackWorld(RANKS).run(case) == [2] * RANKS
    assert time.monotonic() - started < BEFORE_DEADLINE, "somebody has waited for the deadline"
