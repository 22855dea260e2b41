"""Wrappers, averages, verbs and mistakes on sharded replicas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sharded import edge_cases, tool_cases
from tests.sharded.world import run_cases

EXACT = (
    "module_wrapper",
    "module_wrapper_of_tensor_parallel",
    "micro_batches",
    "gradients_of_two_passes",
    "clipping",
    "update_in_backward",
    "small_buckets_in_pieces",
    "parameters_that_are_not_reshard",
    "frozen_and_tied",
    "values_given_anew",
    "shards_that_are_copied",
    "offloaded_shards",
    "half_precision_beside_whole_replicas",
)
TRUE = ("evaluation_of_the_average", "shards_lie_in_buckets")
EQUAL = (
    "averages",
    "published_average",
    "switch",
    "join",
    "state_of_a_method",
    "checkpoint_of_the_average",
    "broadcast_of_a_state",
)
OFTEN = ["tp: win_put", "tp: choco_sgd"]
RARELY = [name for name in tool_cases.OWN_LAWS if name not in OFTEN]
REMEDIES = {
    "no mesh": "give mesh=mesh['replica']",
    "average without mesh": "call it within bf.replicas(mesh['replica'])",
    "distance without mesh": "give mesh=mesh['replica']",
    "two dimensions": "got a mesh of shape (2, 2)",
    "no mesh at all": "expected one dimension of a DeviceMesh",
    "sharded over replicas": "shard the model over the other dimensions alone",
    "another dimension": "shard the model over the other dimensions alone",
    "autotune": "a bucket_size_in_mb by hand",
    "clock": "num_steps_per_communication",
    "fused": "use the optimizer's own fused=True",
    "checkpoint": "give mesh=mesh['replica']",
    "state": "give mesh=mesh['replica']",
}


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("edges")
    return run_cases("tests.sharded.edge_cases", list(edge_cases.CASES), 4, folder)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tools")
    return run_cases("tests.sharded.tool_cases", [*tool_cases.TOOLS, *OFTEN], 4, folder)


@pytest.fixture(scope="module")
def of_their_own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases("tests.sharded.tool_cases", RARELY, 4, tmp_path_factory.mktemp("laws"))


def _results(case: str, outcomes: dict[str, Any]) -> list[Any]:
    outcome = outcomes[case]
    assert not outcome["problems"], "\n".join(outcome["problems"])
    found: list[Any] = outcome["results"]
    return found


def _all_exact(found: Any) -> bool:
    each = found if isinstance(found, list) else [found]
    return all(one <= 1e-12 for one in each)


@pytest.mark.parametrize("case", EXACT)
def test_wrappers_and_models_equal_whole_replicas(case: str, edges: dict[str, Any]) -> None:
    """To 1e-12 in float64: whatever the loop, and where parameters are frozen, tied or copied."""
    assert all(map(_all_exact, _results(case, edges)))


@pytest.mark.parametrize("case", TRUE)
def test_what_a_sharded_wrapper_promises(case: str, edges: dict[str, Any]) -> None:
    """The average is shown in ``eval()``; buckets are FSDP2's memory."""
    for found in _results(case, edges):
        assert found is True or all(found)


@pytest.mark.parametrize("case", EQUAL)
def test_tools_give_what_they_give_of_whole_replicas(case: str, tools: dict[str, Any]) -> None:
    """To 1e-12: averages, distances, broadcasts, switches, joins and states."""
    assert all(map(_all_exact, _results(case, tools)))


def test_averages_are_gathered_anew(tools: dict[str, Any]) -> None:
    """No rank shows parameters that FSDP2 had gathered before the average, or in it."""
    assert all(map(all, _results("average_after_evaluation", tools)))


def test_columns_are_worlds_of_their_own(tools: dict[str, Any]) -> None:
    """Ranks count replicas, and what is sent in one column never arrives in another."""
    for (rank, size, mean, read), column, replica, same, world in _results(
        "world_of_replicas", tools
    ):
        assert (rank, size, world) == (replica, 2, 4)
        assert mean == read == [10.0 * column + 0.5] * 2
        assert same


def _trains(found: dict[str, float]) -> bool:
    near = found["copies apart"] == 0.0 and found["spread"] < 0.5
    return near and found["last"] < 0.9 * found["first"]


@pytest.mark.parametrize("case", OFTEN)
def test_methods_of_blocks_and_of_chance_train(case: str, tools: dict[str, Any]) -> None:
    """Losses fall, replicas stay together, and copies inside a replica stay equal bit by bit."""
    assert all(map(_trains, _results(case, tools)))


@pytest.mark.nightly
@pytest.mark.parametrize("case", RARELY)
def test_other_methods_of_their_own_laws_train(case: str, of_their_own: dict[str, Any]) -> None:
    """As above: asynchronous ones, and those whose compressors look at a shard as a whole."""
    assert all(map(_trains, _results(case, of_their_own)))


@pytest.mark.parametrize("mistake", REMEDIES)
def test_mistakes_name_their_remedy(mistake: str, tools: dict[str, Any]) -> None:
    """What cannot be is refused on all ranks before anything is sent."""
    for told in _results("mistakes", tools):
        assert REMEDIES[mistake] in told[mistake]


def test_columns_agree_on_settings(tools: dict[str, Any]) -> None:
    """All columns average by the same method, though none hears of another."""
    for told in _results("settings_that_differ", tools):
        assert "rank 0 has local_sgd, and rank 1 has diloco" in told
