"""Checkpoints of sharded replicas: exact on the same layout, and read in parts of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sharded.checkpoint_cases import EIGHT, OTHERS, RESUMED
from tests.sharded.checkpoint_mistakes import CASES as MISTAKES
from tests.sharded.world import run_cases

MODULE = "tests.sharded.checkpoint_cases"
REMEDIES = {
    "no mesh": "give mesh=mesh['replica']",
    "load without mesh": "give mesh=mesh['replica']",
    "whole model": "leave mesh out",
    "load whole model": "leave mesh out",
    "wait": "call it on all ranks after the same step",
    "two dimensions": "got a mesh of shape (2, 2)",
    "ordinary state": "make it by torch.zeros_like(parameter)",
}
OF_OTHERS = {
    "of whole replicas": "load it without mesh before the model is sharded",
    "of sharded ones": "of replicas that 2 ranks share",
    "another model": "head.weight has shape (5, 6) in it, and (4, 6) in the model",
    "another method": "would go on with gradient_tracking",
    "parts of ranks": "take replicas='average'",
}
ODD = ("what_fsdp_has_gathered", "state_of_another_shape")
HARMS = {
    "a bit": "average/__1_0.distcp: it is damaged",
    "metadata": "average/.metadata: it is damaged",
    "cut": "has no whole average/__0_0.distcp",
    "lacking": "has no whole average/__1_0.distcp",
    "no manifest": "half-written",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that worlds of different numbers of ranks share."""
    found = tmp_path_factory.mktemp("layouts")
    (found / "saved").mkdir()
    return found


def _run(names: Any, ranks: int, place: Path) -> dict[str, Any]:
    folder = place / f"{ranks} ranks"
    folder.mkdir()
    return run_cases(MODULE, list(names), ranks, folder)


@pytest.fixture(scope="module")
def four(place: Path) -> dict[str, Any]:
    return _run(["saved_for_others", *ODD, *RESUMED, *OTHERS[4]], 4, place)


@pytest.fixture(scope="module")
def fewer(four: dict[str, Any], place: Path) -> dict[str, Any]:
    assert not four["saved_for_others"]["problems"]
    return {**_run(OTHERS[2], 2, place), **_run(OTHERS[1], 1, place)}


@pytest.fixture(scope="module")
def eight(four: dict[str, Any], place: Path) -> dict[str, Any]:
    assert not four["saved_for_others"]["problems"]
    return _run(EIGHT, 8, place)


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mistakes")
    return run_cases("tests.sharded.checkpoint_mistakes", list(MISTAKES), 4, folder)


def _results(case: str, outcomes: dict[str, Any]) -> list[Any]:
    outcome = outcomes[case]
    assert not outcome["problems"], "\n".join(outcome["problems"])
    found: list[Any] = outcome["results"]
    return found


def _goes_on_exactly(case: str, outcomes: dict[str, Any]) -> None:
    for found in _results(case, outcomes):
        assert all(found["told"])
        assert found["loaded"] == [0, 0.0]
        assert found["further"][1] <= 1e-12


def _arrives(case: str, outcomes: dict[str, Any]) -> None:
    for found in _results(case, outcomes):
        assert all(found["told"])
        assert found["loaded"][0] == 0 if found["own"] else found["loaded"][1] <= 1e-15
        assert found["further"] <= 1e-12


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_as_if_it_had_not_stopped(case: str, four: dict[str, Any]) -> None:
    """Parameters and optimizer are equal to the bit, further steps to 1e-12 in float64."""
    _goes_on_exactly(case, four)


def test_replicas_differ_where_each_is_saved(four: dict[str, Any]) -> None:
    """Else one model for all would pass as each replica's own."""
    for apart in _results("saved_for_others", four):
        assert apart > 1e-3


def test_parameters_may_be_gathered(four: dict[str, Any]) -> None:
    """FSDP2 shards them again, as it does before a step."""
    for gathered, bits, _ in _results("what_fsdp_has_gathered", four):
        assert gathered
        assert bits == 0


def test_state_may_have_a_shape_of_its_own(four: dict[str, Any]) -> None:
    """Such a DTensor is read whole by each rank, to 1e-15."""
    for count, difference in _results("state_of_another_shape", four):
        assert count > 10
        assert difference <= 1e-15


@pytest.mark.parametrize("case", OTHERS[4])
def test_other_layouts_go_on(case: str, four: dict[str, Any]) -> None:
    """As many replicas go on with their own models and the method's state, others from the average.

    Further steps are those of the layout that was saved, to 1e-12.
    """
    _arrives(case, four)


@pytest.mark.parametrize("case", [*OTHERS[2], *OTHERS[1]])
def test_fewer_ranks_go_on(case: str, fewer: dict[str, Any]) -> None:
    """Two replicas of one rank, and one replica of two ranks and of one, likewise."""
    _arrives(case, fewer)


@pytest.mark.nightly
@pytest.mark.parametrize("case", OTHERS[8])
def test_more_ranks_go_on(case: str, eight: dict[str, Any]) -> None:
    """Two replicas of four parts, by FSDP2 and by FSDP2 over tensor parallelism, likewise."""
    _arrives(case, eight)


@pytest.mark.nightly
def test_fsdp_over_tensor_parallelism_goes_on_exactly(eight: dict[str, Any]) -> None:
    """Parameters that one dimension shards and another one replicates are saved once."""
    _goes_on_exactly("2x2x2: diloco", eight)


@pytest.mark.parametrize("mistake", REMEDIES)
def test_arguments_that_cannot_be_name_their_remedy(mistake: str, mistakes: dict[str, Any]) -> None:
    """All ranks refuse, and nothing is written."""
    for told in _results("arguments", mistakes):
        assert REMEDIES[mistake] in told[mistake]
        assert told["files"] == ""


def test_ranks_of_a_replica_have_one_model(mistakes: dict[str, Any]) -> None:
    """Stages of a pipeline, which have other tensors, are not saved as one stage."""
    for told in _results("models_that_differ", mistakes):
        assert "of_this_stage" in told


@pytest.mark.parametrize("other", OF_OTHERS)
def test_checkpoints_of_others_are_refused(other: str, mistakes: dict[str, Any]) -> None:
    """All ranks tell why, and model and optimizer stay as they were."""
    for told in _results("checkpoints_of_others", mistakes):
        message, same = told[other]
        assert OF_OTHERS[other] in message
        assert same
        assert told["their average"] == [1, True]


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_found_before_anything_is_changed(harm: str, mistakes: dict[str, Any]) -> None:
    """All ranks raise the same error for the step, and take the one before without a step."""
    every = [told[harm] for told in _results("damage", mistakes)]
    assert len({message for message, *_ in every}) == 1
    for message, same, step, difference in every:
        assert message.startswith("EnvironmentProblem")
        assert HARMS[harm] in message
        assert (same, step, difference) == (True, 1, 0.0)


def test_a_disk_that_is_full_leaves_the_former_checkpoint(mistakes: dict[str, Any]) -> None:
    """All ranks raise; files of the new one are gone, also where it was to replace the former."""
    for found in _results("a_disk_that_is_full", mistakes):
        for told, same, cleared in (found[0:3], found[3:6]):
            assert "rank 1 could not write" in told
            assert "No space left on device" in told
            assert same
            assert cleared
        assert found[6] == 1


def test_old_checkpoints_are_removed_whole(mistakes: dict[str, Any]) -> None:
    """Only the last one's files stay, those of replica 0, from which all replicas go on."""
    parts = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    names = ["manifest.json", "rank0.3.pt", *(f"rank0.3/{name}" for name in parts)]
    for found in _results("what_stays", mistakes):
        assert found["names"] == [f"step_0000000003/{name}" for name in names]
        assert (found["step"], found["bits"]) == (3, 0)


def test_each_rank_writes_its_parts_and_torch_reads_them(mistakes: dict[str, Any]) -> None:
    """Chunks are of a shard's size, and ``dcp.load`` gives a whole model the average."""
    for chunks, difference in _results("files_of_torch", mistakes):
        assert chunks == [[4, 6], [4, 6]]
        assert difference == [0, 0.0]


def test_a_module_wrapper_goes_on_exactly(mistakes: dict[str, Any]) -> None:
    """Its optimizers are saved with it, by the names of the parameters."""
    for bits, difference in _results("module_wrapper", mistakes):
        assert (bits, difference) == (0, 0.0)
