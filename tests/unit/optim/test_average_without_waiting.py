"""``average_model(wait=False)`` and what it refuses, leaves out and restores, by its messages."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.windows import windows_of
from tests.support import PATIENCE, LoopbackWorld, until

pytestmark = pytest.mark.training

still = partial(torch.optim.SGD, lr=0.0)


def constant(value):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(value))
    return model


def wrapped(model, method="win_put", **options):
    if method != "ad_psgd" and bf.size() > 2:
        options = {"topology": topology.ring(bf.size()), **options}
    make = still(model.parameters())
    return bf.DistributedOptimizer(make, model, method, broadcast=False, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def lent(model, **options):
    average = bf.average_model(model, wait=False, **options)
    with average as inside:
        return inside.weight[0, 0].item(), average


def test_who_was_asked_polls_often_as_long_as_there_are_windows():
    """The next look at a computing rank takes no tenth of a second."""

    def case():
        engine, model = bf.current().engine, constant(bf.rank())
        pause = engine.idle_interval
        optimizer = wrapped(model)
        step(model, optimizer)
        bf.barrier()
        before = engine.idle_interval
        bf.barrier()
        if bf.rank() == 0:
            lent(model)
        bf.barrier()
        asked = engine.idle_interval
        bf.win_free()
        return before / pause, asked / pause, engine.idle_interval / pause

    first, *others = LoopbackWorld(3).run(case)
    assert first == (1, 1, 1)
    assert all(one[0] == 1 and one[1] < 0.1 and one[2] == 1 for one in others), others


def test_ranks_that_are_no_neighbours_and_sleep_in_their_step():
    """The owners are in the middle of their forward pass, and wait for the end of the average."""
    over = threading.Event()

    def case():
        model = constant(bf.rank())
        optimizer = wrapped(model)
        bf.barrier()
        if bf.rank() == 0:
            mean, average = lent(model)
            over.set()
            return mean, sorted(average.ages), average.missing
        model.register_forward_hook(lambda *_: over.wait(PATIENCE) and None)
        step(model, optimizer)
        return over.is_set()

    assert LoopbackWorld(5).run(case) == [(2.0, [0, 1, 2, 3, 4], ()), True, True, True, True]


def test_a_replica_has_an_age():
    """By how many averagings it is behind, or ahead, and the seconds since it was published."""
    over = threading.Event()

    def case():
        model = constant(bf.rank())
        optimizer = wrapped(model)
        for _ in range(3 + 2 * bf.rank()):
            step(model, optimizer)
        bf.barrier()
        if bf.rank() == 1:
            _, average = lent(model)
            over.set()
            return average.ages
        over.wait(PATIENCE)
        return None

    ages = LoopbackWorld(3).run(case)[1]
    assert {rank: age.lag for rank, age in ages.items()} == {0: 2, 1: 0, 2: -2}
    assert ages[1].seconds == 0.0
    assert 0.0 < ages[0].seconds < PATIENCE


@pytest.mark.parametrize("method", ["win_put", "ad_psgd"])
def test_one_rank_has_its_own_model(method):
    """At n = 1 all is as with several ranks, but for these."""

    def case():
        model = constant(3.0)
        optimizer = wrapped(model, method)
        step(model, optimizer)
        mean, average = lent(model)
        return mean, average.ages, average.missing

    assert LoopbackWorld(1).run(case) == [(3.0, {0: (0, 0.0)}, ())]


def test_the_own_model_is_back_after_an_error():
    """Parameters and buffers, which may have been changed inside, bit by bit."""

    def case():
        model = torch.nn.Sequential(constant(bf.rank()), torch.nn.BatchNorm1d(1))
        _ = wrapped(model)
        own = [one.clone() for one in (*model.parameters(), *model.buffers())]
        bf.barrier()

        def evaluate():
            with bf.average_model(model, wait=False) as inside:
                assert inside[0].weight[0, 0].item() == 0.5
                inside.train()(torch.randn(4, 2))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            evaluate()
        assert all(map(torch.equal, (*model.parameters(), *model.buffers()), own))
        bf.barrier()

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize("method", ["win_put", "pull_get", "push_sum"])
def test_what_is_lent_is_not_published(method):
    """A training pass of a rank's average leaves its own replica to the others."""
    passed, seen = threading.Event(), threading.Event()

    def case():
        model = constant(bf.rank())
        _ = wrapped(model, method)
        bf.barrier()
        assert bf.rank() == 1 or passed.wait(20)
        with bf.average_model(model, wait=False):
            model(torch.ones(3, 2)).sum()
            found = model.weight[0, 0].item()
            passed.set()
            assert bf.rank() == 0 or seen.wait(20)
        seen.set()
        bf.barrier()
        return found

    assert LoopbackWorld(2).run(case) == [0.5, 0.5]


def test_before_the_first_step_of_a_module_there_is_its_own():
    """A DecentralizedDataParallel publishes at the end of its first backward pass."""

    def case():
        ddp = bf.DecentralizedDataParallel(constant(bf.rank()), bf.optim_fn_adamw, sync=False)
        _, average = lent(ddp)
        return sorted(average.ages), average.missing

    assert LoopbackWorld(2).run(case) == [([0], (1,)), ([1], (0,))]


def test_frozen_parameters_stay_the_ranks_own():
    """What the wrapper does not train is not published."""

    def case():
        model = torch.nn.Sequential(constant(bf.rank()), torch.nn.Linear(1, 1, bias=False))
        model[1].requires_grad_(False).weight.fill_(10.0 + bf.rank())
        _ = wrapped(model)
        bf.barrier()
        with bf.average_model(model, wait=False):
            found = model[0].weight[0, 0].item(), model[1].weight.item()
        bf.barrier()
        return found

    assert LoopbackWorld(2).run(case) == [(0.5, 10.0), (0.5, 11.0)]


def test_complex_parameters_are_averaged():
    """Windows hold them as pairs of real numbers."""

    def case():
        model = torch.nn.Module()
        start = torch.tensor([complex(bf.rank(), 2.0 * bf.rank())])
        model.register_parameter("weight", torch.nn.Parameter(start))
        _ = wrapped(model)
        bf.barrier()
        with bf.average_model(model, wait=False):
            found = model.weight.item()
        bf.barrier()
        return found

    assert LoopbackWorld(3).run(case) == [1 + 2j] * 3


def test_pairs_have_published_nothing_before_their_first_step():
    """The others answer so at once, and the deadline is not waited for."""

    def case():
        model = constant(bf.rank())
        _ = wrapped(model, "ad_psgd")
        bf.barrier()
        begun = time.monotonic()
        mean, average = lent(model, timeout=10 * PATIENCE)
        assert time.monotonic() - begun < PATIENCE
        bf.barrier()
        return mean, average.missing

    assert LoopbackWorld(2).run(case) == [(0.0, (1,)), (1.0, (0,))]


# who is left out


@pytest.mark.parametrize("method", ["win_put", "ad_psgd"])
def test_who_has_departed_is_left_out(method):
    """By ``conclude()``, after fewer steps; who has made as many, or more, still counts."""

    def case():
        model = constant(bf.rank())
        optimizer = wrapped(model, method)
        optimizer.force_barrier = True
        step(model, optimizer)
        optimizer.force_barrier = False
        assert lent(model)[1].missing == ()
        bf.barrier()
        if bf.rank() == 0:
            step(model, optimizer)
        else:
            optimizer.conclude()
        bf.barrier()
        found = lent(model)[1].missing
        bf.barrier()
        return found

    assert LoopbackWorld(2).run(case) == [(1,), ()]


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_who_has_ended_is_left_out(how, caplog):
    """The average is of those that are left; nobody waits, and nothing is said of it."""

    def case():
        model = constant(bf.rank())
        _ = wrapped(model)
        bf.barrier()
        if bf.rank() == 1:
            if how == "raises":
                raise RuntimeError("no more")
            return None
        until(lambda: bf.current().engine.has_exited(1))
        mean, average = lent(model)
        done.wait(PATIENCE)
        return mean, average.missing

    done = threading.Barrier(2)
    outcomes = LoopbackWorld(3).outcomes(case)
    assert [one.value for one in outcomes if one.rank != 1] == [(1.0, (1,))] * 2
    assert not caplog.records


@pytest.mark.parametrize("others", [1, 2])
def test_who_does_not_answer_in_time_is_left_out(others, caplog):
    """A warning names it. With nobody else there is this rank's own model."""
    stopped, done = threading.Barrier(others + 1), threading.Barrier(others + 1)

    def case():
        model, found = constant(bf.rank()), None
        _ = wrapped(model)
        edges = windows_of(bf.current()).find("", "DistributedOptimizer0.bucket0").edges
        bf.barrier()
        if bf.rank() == 1:
            with bf.current().engine.lock:  # no thread of this rank makes progress
                stopped.wait(PATIENCE)
                done.wait(PATIENCE)
        else:
            stopped.wait(PATIENCE)
            mean, average = lent(model, timeout=0.5)
            found = mean, average.missing
            done.wait(PATIENCE)
        bf.barrier()
        assert lent(model)[0] == others / 2
        bf.barrier()
        until(lambda: not edges.lent, "what came too late")
        bf.barrier()
        return found

    with caplog.at_level(logging.WARNING, "asyncddp"):
        found = LoopbackWorld(others + 1).run(case)
    means = {1: [0.0], 2: [1.0, 1.0]}[others]
    assert [one for one in found if one] == [(mean, (1,)) for mean in means]
    words = "fetching published replicas: rank 1 left out, without an answer in 0.5 s"
    assert [words in one.getMessage() for one in caplog.records] == [True] * others


def test_what_is_lent_is_given_back():
    """In shared memory a tensor is held while it is read: no longer, also after an error."""

    def case():
        model = constant(bf.rank())
        optimizer = wrapped(model)
        window = windows_of(bf.current()).find("", "DistributedOptimizer0.bucket0")
        for _ in range(20):
            step(model, optimizer)
            if bf.rank() == 0:
                lent(model)
        bf.barrier()
        until(lambda: not window.edges.lent, "the last one that was lent")
        bf.barrier()
        return len(window._pool.buffers)

    assert max(LoopbackWorld(4).run(case)) <= 6


# mistakes


SYNCHRONOUS = [
    ({}, "adapt_then_combine, which trains it by neighbor_allreduce, publishes nothing"),
    (
        {"algorithm": "async_model_average", "sync_interval_ms": 1000.0},
        "async_model_average, which trains it by allreduce, publishes nothing",
    ),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("options", "words"), SYNCHRONOUS)
def test_methods_whose_ranks_wait_publish_nothing(options, words, ranks, tmp_path):
    """The error says which method, and what to do, on any number of ranks."""

    def case():
        model = constant(0.0)
        optimizer = bf.DistributedOptimizer(still(model.parameters()), model, **options)
        remedy = f"{words}; expected wait=True, on all ranks between two steps, or a one-sided"
        with pytest.raises(bf.ArgumentError, match=remedy), bf.average_model(model, wait=False):
            pass
        with pytest.raises(bf.ArgumentError, match=remedy):
            bf.save_checkpoint(tmp_path, model, optimizer, wait=False)
        optimizer.abort()

    LoopbackWorld(ranks).run(case)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_wrapper_publishes_nothing():
    """Nor does DistributedDataParallel's, or one whose wrapper is gone."""

    def case():
        model = constant(0.0)
        words = "argument wait: with False it fetches .*, and no wrapper of this model publishes it"
        with pytest.raises(bf.ArgumentError, match=words), bf.average_model(model, wait=False):
            pass

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "long", True])
def test_a_timeout_is_a_number_above_zero(timeout, tmp_path):
    """Of the average and of the checkpoint; all else is an error that names the argument."""
    words = "argument timeout: expected a number above 0, got"
    with bf.local_world(1) as world:

        def case():
            with pytest.raises(bf.ArgumentError, match=f"average_model: {words}"):
                bf.average_model(constant(0.0), wait=False, timeout=timeout)
            with pytest.raises(bf.ArgumentError, match=f"save_checkpoint: {words}"):
                bf.save_checkpoint(tmp_path, constant(0.0), step=1, wait=False, timeout=timeout)

        world.run(case)


def test_a_timeout_is_for_those_who_do_not_wait(tmp_path):
    """Ranks that wait for each other have ASYNCDDP_TIMEOUT."""

    def case():
        words = "argument timeout: expected None, or wait=False with it, got 5"
        with pytest.raises(bf.ArgumentError, match=words):
            bf.average_model(constant(0.0), timeout=5)
        with pytest.raises(bf.ArgumentError, match=words):
            bf.save_checkpoint(tmp_path, constant(0.0), step=1, timeout=5)

    LoopbackWorld(1).run(case)


@pytest.mark.parametrize("replicas", ["all", "rank0"])
def test_one_rank_saves_the_average_alone(replicas, tmp_path):
    """It has no other rank's state."""

    def case():
        model = constant(0.0)
        optimizer = wrapped(model)
        words = f"expected 'average' with wait=False, .* got '{replicas}'"
        with pytest.raises(bf.ArgumentError, match=words):
            bf.save_checkpoint(tmp_path, model, optimizer, wait=False, replicas=replicas)

    LoopbackWorld(2).run(case)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_save_alone_has_its_model_back(tmp_path):
    """The error is this rank's; former checkpoints and the other ranks stay as they are."""

    def case():
        model = constant(bf.rank())
        optimizer = wrapped(model)
        bf.barrier()
        if bf.rank() == 1:
            bf.save_checkpoint(tmp_path / "here", model, optimizer, wait=False)
            (tmp_path / "file").touch()
            with pytest.raises(bf.EnvironmentProblem, match=r"could not write to .*file"):
                bf.save_checkpoint(tmp_path / "file", model, optimizer, wait=False)
            assert model.weight[0, 0].item() == 1.0
        bf.barrier()
        found = bf.load_checkpoint(tmp_path / "here", model, optimizer)
        return model.weight[0, 0].item(), found.manifest["missing"]

    assert LoopbackWorld(2).run(case) == [(0.5, [])] * 2
