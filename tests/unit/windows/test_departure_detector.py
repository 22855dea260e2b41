"""Ranks that leave asynchronous training early take their weight with them."""

from __future__ import annotations

import threading

import pytest

import asyncddp as bf
from asyncddp.windows.departure_detector import CONCLUDED, DepartureDetector
from tests.support import LoopbackWorld
from tests.unit.algorithms.uneven_training import Pace, trained

pytestmark = pytest.mark.training

METHODS = ["win_put", "DecentralizedDataParallel"]
RANKS, STEPS, EARLY = 4, 300, 40


def even():
    """All ranks are equally fast."""
    return Pace([1.0] * RANKS, ahead=20)


def until_the_end(pace, method, leaves):
    """Train; the last rank makes few steps, and leaves in one of several ways."""
    rank = bf.rank()
    step, model, wrapper = trained(method)
    for _ in range(EARLY if rank == RANKS - 1 else STEPS):
        step()
        pace.step(rank)
    pace.done(rank)
    departed = wrapper.departed
    if leaves == "concludes" and rank == RANKS - 1:
        wrapper.conclude()
    if leaves != "returns":
        bf.barrier()
    if leaves == "comes back":
        for _ in range(2):
            step()
            bf.barrier()
        return model.weight.item(), wrapper.departed
    return model.weight.item(), departed


def assert_optimum_of_the_rest(got):
    """The first three reach the mean of 0, 1 and 2; a step size leaves them 0.14 off."""
    rest = [weight for weight, _ in got[:3]]
    assert sum(rest) / 3 == pytest.approx(1.0, abs=0.1)
    assert rest == pytest.approx([1.0] * 3, abs=0.25)
    assert [departed for _, departed in got] == [(3,), (), (3,), ()]


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_whose_function_returns_anchors_nobody(method):
    """Its neighbours give its weight to themselves, and the rest reach the rest's optimum."""
    got = LoopbackWorld(RANKS).run(until_the_end, even(), method, "returns")
    assert_optimum_of_the_rest(got)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_waits_elsewhere_anchors_nobody(method):
    """One that makes no step for long has left, whatever it does."""
    got = LoopbackWorld(RANKS).run(until_the_end, even(), method, "waits")
    assert_optimum_of_the_rest(got)


@pytest.mark.parametrize("method", ["pull_get", "DecentralizedDataParallel"])
def test_a_rank_that_concludes_anchors_nobody(method):
    """It has left at once."""
    got = LoopbackWorld(RANKS).run(until_the_end, even(), method, "concludes")
    assert_optimum_of_the_rest(got)


def trained_by_push_sum(pace):
    """Train; gives the mean of the last 100 steps' weights, and the own push-sum weight p."""
    rank, weights = bf.rank(), []
    step, model, optimizer = trained("push_sum")
    for _ in range(EARLY if rank == RANKS - 1 else STEPS):
        step()
        pace.step(rank)
        weights.append(model.weight.item())
    pace.done(rank)
    (p,) = optimizer._averager.windows.push_sum_weights()
    return sum(weights[-100:]) / len(weights[-100:]), p, optimizer.departed


def test_push_sum_keeps_the_share_of_a_rank_that_has_left():
    """The rest lose no push-sum weight to it, and their mean reaches the optimum of the rest."""
    got = LoopbackWorld(RANKS).run(trained_by_push_sum, even())
    assert [departed for *_, departed in got] == [(3,), (), (3,), ()]
    assert 1.2 < sum(p for _, p, _ in got[:3]) < 3.0, "what is missing is rank 3's, or under way"
    assert sum(weight for weight, *_ in got[:3]) / 3 == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("method", ["win_put", "DecentralizedDataParallel"])
def test_a_rank_that_comes_back_counts_again(method):
    """With its next step it has its weight as before."""
    got = LoopbackWorld(RANKS).run(until_the_end, even(), method, "comes back")
    assert [departed for _, departed in got] == [()] * RANKS


def test_global_avg_says_that_no_step_follows_meanwhile():
    """Who waits for others in it has left, and is back afterwards."""
    left = threading.Event()

    def case():
        step, _, ddp = trained("DecentralizedDataParallel")
        for _ in range(3):
            step()
        bf.barrier()
        if bf.rank() == 0:
            while not ddp.departed:
                step()
            left.set()
        during = ddp.departed
        ddp.global_avg()
        step()
        bf.barrier()
        step()
        bf.barrier()  # nobody has left before
        return during, ddp.departed

    (during, after), *others = LoopbackWorld(2).run(case)
    assert left.is_set()
    assert (during, after) == ((1,), ())
    assert others == [((), ())]


# the table


def test_a_neighbour_that_ended_further_on_still_counts():
    """Who has made all its steps before a slower rank is no early one until that has as many."""
    departures = DepartureDetector(gone=lambda rank: True, failed=lambda rank: False)
    assert [departures.look(own, {1: CONCLUDED + 5, 2: 5}) for own in (4, 5, 6)] == [
        (),
        (),
        (1, 2),
    ]


def test_a_slow_neighbour_has_not_left():
    """One that takes 50 rounds for a step may be silent for 20 times as many, but no longer."""
    departures = DepartureDetector(gone=lambda rank: False, failed=lambda rank: False)
    seen = [departures.look(1000 + k, {1: k // 50}) for k in range(1, 501)]
    assert set(seen) == {()}
    silent = [departures.look(2000 + k, {1: 10}) for k in range(2000)]
    first = silent.index((1,))
    assert 900 <= first <= 1100
    assert set(silent[first:]) == {(1,)}
    assert departures.look(4000, {1: 11}) == ()


def test_a_neighbour_that_has_failed_has_left_at_once():
    """However far it was; one that only ended counts until others are as far."""
    failed = set()
    departures = DepartureDetector(gone=lambda rank: True, failed=failed.__contains__)
    assert departures.look(4, {1: 7, 2: 7}) == ()
    failed.add(1)
    assert departures.look(5, {1: 7, 2: 7}) == (1,)
