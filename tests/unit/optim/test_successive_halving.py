"""Successive halving finds the fastest candidate in the trials that it was said to make."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.optim.successive_halving import SuccessiveHalving, trials_of


def run(search, seconds_of):
    """Measure until the end; gives the order in which candidates were measured."""
    order = []
    while search.current is not None:
        order.append(search.current)
        search.record(seconds_of(search.current, len(order)))
    return order


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=40, unique=True))
def test_the_fastest_wins_in_the_expected_number_of_trials(seconds):
    """Without noise the smallest time wins, after two measurements for each trial."""
    search = SuccessiveHalving(len(seconds))
    order = run(search, lambda candidate, _: seconds[candidate])
    assert seconds[search.best] == min(seconds)
    assert len(order) == search.measurements == 2 * trials_of(len(seconds))


@pytest.mark.parametrize("best", range(6))
@pytest.mark.parametrize("drift", [0.02, -0.002])
def test_a_machine_that_drifts_is_no_candidates_fault(best, drift):
    """Where each measurement takes longer than the last by far more than candidates differ."""
    search = SuccessiveHalving(6)
    run(search, lambda one, k: 0.3 + (one != best) * 0.001 + drift * k)
    assert search.best == best


def test_a_machine_that_is_slower_in_one_sweep_is_no_candidates_fault():
    """A sweep in which all take thrice as long counts like the other one."""
    search = SuccessiveHalving(2)
    run(search, lambda one, k: (0.1, 0.11)[one] * (3 if k <= 2 else 1))
    assert search.best == 0


def test_each_sweep_is_followed_by_its_reverse():
    """So the last one of a sweep is the first of the next, and needs no change of settings."""
    assert run(SuccessiveHalving(3), lambda one, _: 1.0 + one)[:6] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("stop", range(11))
def test_a_search_goes_on_from_its_measurements(stop):
    """At any time, through JSON: the same candidates in the same order, and the same winner."""
    whole, first = SuccessiveHalving(3), SuccessiveHalving(3)
    order = run(whole, lambda one, k: 1.0 + (one + k) % 3)
    for k in range(min(stop, len(order))):
        first.record(1.0 + (order[k] + k + 1) % 3)
    second = SuccessiveHalving(3)
    second.replay(json.loads(json.dumps(first.seconds)))
    done = second.measurements
    rest = run(second, lambda one, k: 1.0 + (one + k + done) % 3)
    assert (order[:done] + rest, second.best, second.seconds) == (order, whole.best, whole.seconds)
