"""Methods average the parts of sharded replicas as they average whole replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sharded.method_cases import ALL_EQUAL, EIGHT, OFTEN, RARELY
from tests.sharded.world import run_cases

MODULE = "tests.sharded.method_cases"


@pytest.fixture(scope="module")
def often(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(MODULE, OFTEN, 4, tmp_path_factory.mktemp("often"))


@pytest.fixture(scope="module")
def rarely(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(MODULE, RARELY, 4, tmp_path_factory.mktemp("rarely"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(MODULE, EIGHT, 8, tmp_path_factory.mktemp("eight"))


def _holds(case: str, outcome: dict[str, Any]) -> None:
    assert not outcome["problems"], "\n".join(outcome["problems"])
    for found in outcome["results"]:
        assert found["difference"] <= 1e-12
        assert found["copies apart"] == 0.0
        assert found["trained"] > 1e-3
        equal_anyhow = case.partition(": ")[2] in ALL_EQUAL
        assert found["spread"] >= 0.0 if not equal_anyhow else found["spread"] <= 1e-12


@pytest.mark.parametrize("case", OFTEN)
def test_a_sharded_run_equals_the_run_of_whole_replicas(case: str, often: dict[str, Any]) -> None:
    """To 1e-12 in float64: a method that treats elements by themselves knows of no shards."""
    _holds(case, often[case])


@pytest.mark.nightly
@pytest.mark.parametrize("case", RARELY)
def test_other_layouts_equal_the_run_of_whole_replicas(case: str, rarely: dict[str, Any]) -> None:
    """To 1e-12: shards without padding, and tensor parallelism alone."""
    _holds(case, rarely[case])


@pytest.mark.nightly
@pytest.mark.parametrize("case", EIGHT)
def test_eight_processes_equal_the_run_of_whole_replicas(case: str, eight: dict[str, Any]) -> None:
    """To 1e-12: FSDP2 over tensor parallelism, and four replicas on a graph with fewer edges."""
    _holds(case, eight[case])
