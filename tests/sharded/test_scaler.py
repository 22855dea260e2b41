"""Sharded replicas leave out a step as one where torch's GradScaler finds infinities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sharded.world import run_cases

MODULE = "tests.sharded.scaler_cases"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("scaler")
    return run_cases(MODULE, ["one_shard", "found_by_one_rank"], 4, folder)


def _results(outcome: dict[str, Any]) -> list[Any]:
    assert not outcome["problems"], "\n".join(outcome["problems"])
    found: list[Any] = outcome["results"]
    return found


def test_infinities_in_one_shard_are_the_replicas(outcomes: dict[str, Any]) -> None:
    """Parameters and scales are those of whole replicas, to 1e-12, with either wrapper."""
    for found in _results(outcomes["one_shard"]):
        assert max(found) <= 1e-12


def test_scales_that_would_differ_are_an_error(outcomes: dict[str, Any]) -> None:
    """Where torch's scaler has told one rank alone, no rank of the replica updates."""
    for told, unchanged in _results(outcomes["found_by_one_rank"]):
        assert "infinities on 1 of the replica's 2 ranks" in told
        assert unchanged


@pytest.mark.nightly
def test_the_module_wrapper_agrees_over_all_meshes(tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism, of whose meshes torch's scaler knows the first one's."""
    case = "shard_over_tensor_parallelism"
    for found in _results(run_cases(MODULE, [case], 8, tmp_path)[case]):
        assert max(found) <= 1e-12
