"""Monitors of sharded replicas report each replica once, with the figures of its whole model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sharded.monitor_cases import CASES, EXACT
from tests.sharded.world import run_cases

MODULE = "tests.sharded.monitor_cases"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("monitor")
    timeline = str(folder / "{rank}.json")
    return run_cases(MODULE, list(CASES), 4, folder, ASYNCDDP_TIMELINE=timeline)


def _results(case: str, outcomes: dict[str, Any]) -> list[Any]:
    outcome = outcomes[case]
    assert not outcome["problems"], "\n".join(outcome["problems"])
    found: list[Any] = outcome["results"]
    return found


@pytest.mark.parametrize("case", EXACT)
def test_the_first_rank_reports_whole_replicas(case: str, outcomes: dict[str, Any]) -> None:
    """Distances and gradient norms are those of whole replicas; other ranks write nothing."""
    first, *others = _results(case, outcomes)
    sharded, whole = first
    assert [one[:2] for one in sharded] == [[step, rank] for step in (2, 4, 6) for rank in (0, 1)]
    for mine, expected in zip(sharded, whole, strict=True):
        assert mine[2] > 1e-3
        assert mine == pytest.approx(expected, rel=1e-12)
    assert not any(written for written, _ in others)


def test_projections_of_parts_estimate_the_distance(outcomes: dict[str, Any]) -> None:
    """Sums of the parts' projections are projections of whole models: 9 % is their error."""
    (sharded, whole), *_ = _results("projected", outcomes)
    assert len(sharded) == 6
    for mine, expected in zip(sharded, whole, strict=True):
        assert mine[2] == pytest.approx(expected[2], rel=0.5)
        assert mine[3] == pytest.approx(expected[3], rel=1e-12)


def test_timelines_show_columns(outcomes: dict[str, Any]) -> None:
    """Steps, averages and messages of a column are there, and peers are ranks of the world."""
    for rank, (peers, mixed, waited, kinds) in enumerate(_results("timeline", outcomes)):
        partner = (rank + 2) % 4
        assert peers == mixed == [partner]
        assert partner in waited
        assert all(kinds)
