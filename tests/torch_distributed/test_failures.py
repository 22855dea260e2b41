"""Who is missing is named, mistakes are explained, and afterwards a new group works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import run_on_mpirun

pytestmark = pytest.mark.launches
SECONDS = 60.0
NO_MORE = "cannot go on after WaitTimeoutError"


def told(name: str, ranks: int, folder: Path) -> dict[tuple[int, str], str]:
    """Run a case, and return what each rank has told under which name."""
    script = f"from tests.torch_distributed import failure_cases\nfailure_cases.main({name!r})\n"
    ended = run_on_mpirun(ranks, script, folder, timeout=SECONDS)
    assert ended.code == 0, ended
    assert not ended.left, ended
    lines = re.findall(r"^rank (\d+) (.+?) after (\d+) s: (.*)$", ended.stdout, re.MULTILINE)
    assert all(int(seconds) <= 6 for _, _, seconds, _ in lines), ended
    return {(int(rank), what): text for rank, what, _, text in lines}


def test_a_rank_that_misses_a_collective_is_named(tmp_path: Path) -> None:
    """On all ranks that wait; later verbs are refused until the group is made anew."""
    found = told("absent_from_collective", 3, tmp_path)
    for rank in (0, 2):
        error = found[rank, "collective"]
        collective = "(collective of the default process group, number 1)"
        assert error.startswith(f"WaitTimeoutError: rank {rank}")
        assert f"allreduce {collective} was not done" in error
        assert error.endswith("was not done in 1 s; missing: rank 1")
        assert NO_MORE in found[rank, "next"]
    assert [found[rank, "second init"] for rank in range(3)] == ["returned 3.0"] * 3


def test_ranks_with_different_shapes_are_told_both(tmp_path: Path) -> None:
    """By a MismatchError on both ranks, before or while MPI would sum them."""
    found = told("other_shapes", 2, tmp_path)
    for count in (3, 300_000):
        for rank in range(2):
            error = found[rank, f"sum of {count}"]
            assert error.startswith(f"MismatchError: rank {rank}, allreduce(sum)"), found
            assert f"({count},)" in error, found
            assert f"({count + 1},)" in error, found


def test_an_error_reaches_wait_and_value_of_queued_works(tmp_path: Path) -> None:
    """Works behind the one that failed are refused."""
    found = told("absent_from_queued_collective", 2, tmp_path)
    assert "missing: rank 1" in found[0, "first wait"]
    assert found[0, "value"] == found[0, "first wait"]
    assert NO_MORE in found[0, "second wait"]


def test_a_message_that_does_not_come_is_named(tmp_path: Path) -> None:
    """With the rank and the tag."""
    found = told("absent_from_message", 2, tmp_path)
    name = "tag 0 of the default process group, from rank 1 to 0"
    error = f"rank 0: recv '{name}' (use 0) was not done in 1 s; missing: rank 1"
    assert found[0, "recv"].endswith(error)


def test_monitored_barrier_names_the_missing_on_all_ranks(tmp_path: Path) -> None:
    """The first one, or all if it waits for all; the group stays usable."""
    found = told("absent_from_barrier", 4, tmp_path)
    for rank in (0, 2, 3):
        assert found[rank, "barrier"].endswith("was not done in 1 s; missing: rank 1")
    assert [found[rank, "later"] for rank in range(4)] == ["returned None"] * 4
    assert found[0, "all named"].endswith("missing: ranks 1\u20133")


def test_a_member_that_does_not_make_a_group_is_named(tmp_path: Path) -> None:
    """Within the timeout of the new group."""
    found = told("absent_from_new_group", 3, tmp_path)
    assert "creating process group" in found[0, "group"]
    assert found[0, "group"].endswith("was not done in 1 s; missing: ranks 1, 2")


def test_bad_arguments_name_what_is_expected_and_leave_the_group_usable(tmp_path: Path) -> None:
    """They are found before anything is sent."""
    found = told("bad_arguments", 2, tmp_path)
    expected = {
        "device": "which this process group serves, got one on meta",
        "layout": "call tensor.to_dense() first",
        "tag": "send: argument tag: expected 0 to 32766, got 40000",
        "operator": "there is no BAND of float32 values",
        "dtype": "argument tensor has dtype torch.float8_e5m2",
        "count": "expected a list with one tensor for each of 2 ranks, got 1",
        "still works": "returned [2.0, 2.0]",
    }
    for what, text in expected.items():
        assert text in found[0, what], found


def test_a_world_that_contradicts_mpis_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    """By an argument, and by WORLD_SIZE."""
    found = told("other_world_size", 2, tmp_path)
    for rank in range(2):
        assert "argument world_size: got 7, but MPI says 2" in found[rank, "world size"]
        variable = "environment variable WORLD_SIZE: got 1, but MPI says 2"
        assert variable in found[rank, "environment"], found


def test_a_misspelt_backend_is_an_error(tmp_path: Path) -> None:
    """With the name as it was spelt."""
    found = told("misspelt_backend", 2, tmp_path)
    assert all("asyncdp" in text.lower() for text in found.values()), found


def test_a_mixture_of_backends_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """With the device and the name that do not go together, on all ranks."""
    found = told("mixed_backends", 2, tmp_path)
    for rank in range(2):
        unknown = "got cuda:nope, but this torch has no such backend; expected one of gloo"
        assert unknown in found[rank, "cpu:asyncddp,cuda:nope"], found
        unserved = "got meta:asyncddp, expected asyncddp for cpu or cuda"
        assert unserved in found[rank, "cpu:gloo,meta:asyncddp"], found


def test_groups_of_this_backend_begin_with_all_ranks_beside_gloo(tmp_path: Path) -> None:
    """Then they can be of some ranks, made by these alone."""
    found = told("group_beside_gloo", 3, tmp_path)
    for rank in (0, 1):
        assert "got 2 of 3 ranks for the first group of this backend" in found[rank, "part"], found
    assert [found[rank, "sums"] for rank in range(3)] == [
        "returned [3.0, 2.0]",
        "returned [3.0, 2.0]",
        "returned [3.0, 1.0]",
    ]
