"""examples/async_digits.py: a straggler slows nobody down, and the script judges itself."""

from __future__ import annotations

import sys

import pytest

from tests.examples.test_digits import PNG, number, table_of
from tests.support.processes import REPO, run_to_end

SCRIPT = str(REPO / "examples" / "async_digits.py")


def run(*options, cwd, ranks=4, timeout=200):
    command = [sys.executable, "-m", "asyncddp", "run", "-np", str(ranks), SCRIPT, *options]
    return run_to_end(command, cwd=cwd, timeout=timeout)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One short run on 4 ranks, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("async")
    return run("--smoke", "--straggler", "3", cwd=folder), folder


def rate(cell):
    return number(cell.removesuffix("/s"))


@pytest.mark.mpi(4)
class TestSmokeOnFourRanks:
    def test_ends_well_and_leaves_no_process(self, smoke):
        done, _ = smoke
        assert done.code == 0, done
        assert not done.left

    def test_columns_are_the_four_trainings(self, smoke):
        kinds = ["sync, equal", "async, equal", "sync, slow", "async, slow"]
        assert table_of(smoke[0])[""] == kinds

    def test_synchronous_ranks_fall_to_the_stragglers_speed_and_others_do_not(self, smoke):
        """Ten times slower is the straggler; its neighbours wait for it only where they must."""
        table = table_of(smoke[0])
        _, _, waiting, free = map(rate, table["rank 0"])
        _, _, slow, _ = map(rate, table["rank 3, straggler"])
        assert waiting < 1.3 * slow
        assert free > 3 * waiting

    def test_picture_is_a_png_in_the_current_folder(self, smoke):
        picture = (smoke[1] / "async_digits.png").read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) > 20_000


@pytest.mark.mpi(2)
def test_a_straggler_that_does_not_exist_is_an_error(tmp_path):
    done = run("--smoke", "--straggler", "7", cwd=tmp_path, ranks=2)
    assert done.code == 1, done
    assert "async_digits.py: --straggler 7: the ranks are 0 to 1" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.mpi(4)
def test_fast_ranks_keep_their_speed_and_the_model_its_accuracy(tmp_path):
    """The whole run: at least 80 % of the steps, within 1.5 points, as the script insists."""
    done = run("--straggler", "3", cwd=tmp_path, timeout=200)
    assert done.code == 0, done
    equal, _, waiting, free = map(number, table_of(done)["average model"])
    assert free >= max(waiting, equal - 1.5)
