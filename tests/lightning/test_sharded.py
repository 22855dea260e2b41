"""Lightning's Trainer and Fabric train replicas that are sharded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sharded.world import run_cases

pytestmark = pytest.mark.training
MODULE = "tests.lightning.sharded_cases"
EXACT = ("trainer_beside_a_loop", "lightnings_own_strategy", "fabrics_own_strategy")
OTHERS = ("callbacks", "validation", "resumed", "weights_and_tests", "mistakes")
REMEDIES = {
    "ranks": "the world of 4 is no multiple of that; start 3 for each replica",
    "size": "expected positive integers, got 2 and 0",
    "validate": "expected one of 'local', 'average', got 'replica'",
    "devices": "leave devices out",
    "checkpoint": "holds no checkpoint of AsyncModelParallelStrategy",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(MODULE, [*EXACT, *OTHERS], 4, tmp_path_factory.mktemp("lightning"))


def _results(case: str, outcomes: dict[str, Any]) -> list[Any]:
    outcome = outcomes[case]
    assert not outcome["problems"], "\n".join(outcome["problems"])
    found: list[Any] = outcome["results"]
    return found


@pytest.mark.parametrize("case", EXACT)
def test_runs_equal_whole_replicas_by_hand(case: str, outcomes: dict[str, Any]) -> None:
    """To 1e-12 in float64, with clipping, accumulation and shares of the data."""
    for found in _results(case, outcomes):
        assert all(one <= 1e-12 for one in found)


def test_callbacks_work_with_either_strategy(outcomes: dict[str, Any]) -> None:
    """They watch and switch the optimizers, whoever has wrapped them; the first rank logs."""
    for number, of_each in enumerate(_results("callbacks", outcomes)):
        for algorithm, *distances in of_each:
            assert algorithm == "gradient_allreduce"
            assert all((one is not None) == (number == 0) for one in distances)


def test_validation_sees_the_chosen_model(outcomes: dict[str, Any]) -> None:
    """The average is the same on all replicas, which keep their own models."""
    for average, local in _results("validation", outcomes):
        assert average == [True, True]
        assert local == [False, True]


def test_replicas_resume(outcomes: dict[str, Any]) -> None:
    """Bit by bit on as many replicas; from the average on others."""
    for exact, steps, epoch, near in _results("resumed", outcomes):
        assert (exact, steps, epoch) == (True, 8, 2)
        assert near <= 1e-15


def test_weights_are_tested_and_nothing_is_saved_after_a_failure(outcomes: dict[str, Any]) -> None:
    """A folder of weights holds the average; after an exception ranks do not wait for parts."""
    for near, late in _results("weights_and_tests", outcomes):
        assert near <= 1e-15
        assert not late


@pytest.mark.parametrize("mistake", REMEDIES)
def test_mistakes_name_their_remedy(mistake: str, outcomes: dict[str, Any]) -> None:
    """On all ranks, before anything is trained."""
    for told in _results("mistakes", outcomes):
        assert REMEDIES[mistake] in told[mistake]
