"""Tests that loop: every case runs, those that failed are named, and ranks do it by themselves."""

from __future__ import annotations

import inspect

import pytest
import torch

import asyncddp as bf
from tests.support import LoopbackWorld, RanksFailedError, on
from tests.support.loops import each, on_each_rank

SEEN: list[tuple[int, str]] = []


@each("number", [1, 2, 3])
@each(("letter", "other"), [("a", "x"), ("b", "y")], ids=["first", "second"])
def product(kept, number, letter, other):
    SEEN.append((number, letter))
    assert kept == "kept"
    assert (number, other) != (2, "y"), "not this one"


def test_all_cases_run_and_those_that_failed_are_named():
    """Loops in loops; what is no case's stays an argument."""
    SEEN.clear()
    assert list(inspect.signature(product).parameters) == ["kept"]
    words = r"1 of 3 cases of number failed:\n2: 1 of 2 cases of letter, other failed:\nsecond: not"
    with pytest.raises(AssertionError, match=words):
        product("kept")
    assert len(SEEN) == len(set(SEEN)) == 6


def test_what_is_no_assertion_ends_the_loop():
    """Ranks may be anywhere then; the case is named, and the error is its cause."""

    @each("number", [1, 0, 2])
    def divides(number):
        assert 1 / number

    with pytest.raises(AssertionError, match="number = 0") as caught:
        divides()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_expectation_of_pytest_that_fails_is_listed():
    """``pytest.raises`` without an error is a failed assertion, too."""

    @each("number", [1, 0])
    def divides(number):
        with pytest.raises(ZeroDivisionError):
            assert 1 / number

    with pytest.raises(AssertionError, match=r"1 of 2 cases of number failed:\n1: DID NOT RAISE"):
        divides()


@on("loopback-2", "mpi-2")
@on_each_rank(settings={"timeout": 7.0})
@each("number", [1.0, 2.0])
def test_ranks_loop_by_themselves(number):
    """With the settings of the world, whether they are threads or processes."""
    assert bf.current().config.timeout == 7.0
    assert bf.allreduce(torch.full((1,), number)).tolist() == [number]


@on_each_rank(ranks=3)
def test_ranks_may_be_so_many_threads():
    """No world is asked for."""
    assert bf.size() == 3


@on_each_rank
def fails(number):
    assert bf.rank() != number, "of one rank"


def test_a_rank_that_fails_fails_the_test():
    """With its traceback."""
    fails(LoopbackWorld(2), number=2)
    with pytest.raises(RanksFailedError, match="of one rank"):
        fails(LoopbackWorld(2), number=1)
