"""examples/digits.py trains, compares, draws, and fails in words where it must."""

from __future__ import annotations

import json
import re
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.support.processes import REPO, Finished, run_to_end

SCRIPT = str(REPO / "examples" / "digits.py")
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10
PNG = b"\x89PNG\r\n\x1a\n"


ASYNCDDP = (sys.executable, "-m", "asyncddp")


def run_digits(
    ranks: int, *options: str, cwd: Path, timeout: float = 200, run: tuple[str, ...] = ()
) -> Finished:
    launcher = [*ASYNCDDP, "run", "-np", str(ranks), *run] if ranks > 1 else [sys.executable]
    return run_to_end([*launcher, SCRIPT, *options], cwd=cwd, timeout=timeout)


def table_of(done: Finished) -> dict[str, list[str]]:
    """The rows of the printed table: first cell → the others."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout)
    rows = [re.split(r"[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in "│┃"]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows if cells}


def number(cell: str) -> float:
    return float(re.sub(r"[ %B,]", "", cell))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One short run on 4 ranks with a timeline, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("smoke")
    return run_digits(4, "--smoke", cwd=folder, run=("--timeline", "out")), folder


@pytest.mark.mpi(4)
class TestSmokeOnFourRanks:
    def test_ends_well_and_leaves_no_process(self, smoke):
        done, _ = smoke
        assert done.code == 0, done
        assert not done.left

    def test_table_has_a_row_per_rank_with_its_digits_and_none_has_all(self, smoke):
        """Each digit is one rank's, and every rank's own model is shown for both methods."""
        table = table_of(smoke[0])
        ranks = [row for row in table if row.startswith("rank ")]
        digits = [row.partition(" saw ")[2].split() for row in ranks]
        assert sorted(chain.from_iterable(digits)) == list("0123456789")
        assert len(ranks) == 4
        assert all(0 < number(cell) <= 100 for row in ranks for cell in table[row][:2])

    def test_columns_are_the_three_trainings(self, smoke):
        assert table_of(smoke[0])[""] == ["adapt_with_combine", "gradient_allreduce", "one rank"]

    def test_models_have_learnt(self, smoke):
        """Sixty steps are enough to be far above chance, by each method."""
        assert all(number(cell) > 60 for cell in table_of(smoke[0])["average model"])

    def test_bytes_per_step_are_one_model_and_a_ring_allreduce(self, smoke):
        """One peer: the model once; a ring allreduce: 2 (n - 1) / n times; alone: nothing."""
        one_peer, centralised, alone = map(number, table_of(smoke[0])["sent per rank, step"])
        model = 4 * PARAMETERS
        assert model <= one_peer <= 1.02 * model
        assert 1.5 * model <= centralised <= 1.02 * 1.5 * model
        assert alone == 0

    def test_consensus_distance_is_zero_with_a_central_average_only(self, smoke):
        neighbours, centralised, *_ = table_of(smoke[0])["consensus distance"]
        assert number(neighbours) > 0
        assert number(centralised) == 0

    def test_picture_is_a_png_in_the_current_folder(self, smoke):
        picture = (smoke[1] / "digits.png").read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) > 20_000

    def test_timeline_is_merged_and_reported(self, smoke):
        """Two commands more show what happened in it: steps, messages, and who waited for whom."""
        trace, folder = "t.json", smoke[1]
        for command in (
            ("merge", "out", "-o", trace),
            ("report", trace, "--skip", "0", "--json", "r.json", "--plot", "r.png"),
        ):
            done = run_to_end([*ASYNCDDP, "timeline", *command], cwd=folder)
            assert done.code == 0, done
        events = json.loads((folder / trace).read_text())
        assert {event["pid"] for event in events} == set(range(4))
        assert min(event["ts"] for event in events if "ts" in event) >= 0
        assert events[-1]["args"] == {"kept": 4 * 60, "dropped": 0}  # one peer per step
        found = json.loads((folder / "r.json").read_text())
        for rank in found["ranks"]:
            assert rank["steps"] == 120  # sixty by each of the two methods
            assert min(rank["compute"], rank["exposed"]) > 0
            assert 2 * PARAMETERS <= rank["sent"] == rank["received"] <= 1.02 * 2 * PARAMETERS
        assert (folder / "r.png").read_bytes().startswith(PNG)
        assert "Waited for most: rank " in done.stdout


def test_on_one_rank_all_methods_are_the_same_training(tmp_path):
    """At n = 1 there is nothing to average: three times plain torch, and nothing is sent."""
    done = run_digits(1, "--smoke", "--out", "alone.png", cwd=tmp_path)
    assert done.code == 0, done
    table = table_of(done)
    assert len(set(table["average model"])) == 1
    assert {number(cell) for cell in table["sent per rank, step"]} == {0}
    assert (tmp_path / "alone.png").read_bytes().startswith(PNG)


@pytest.mark.mpi(2)
def test_gradient_allreduce_can_be_run_alone(tmp_path):
    done = run_digits(2, "--smoke", "--algorithm", "gradient_allreduce", cwd=tmp_path)
    assert done.code == 0, done
    assert table_of(done)[""] == ["gradient_allreduce", "one rank"]


@pytest.mark.mpi(4)
def test_fails_in_words_where_the_average_model_falls_behind(tmp_path):
    """Three epochs are too few for averaging with one neighbour: exit code 1, and why."""
    done = run_digits(4, "--epochs", "3", cwd=tmp_path)
    assert done.code == 1, done
    behind = re.search(
        r"digits\.py: the average model of adapt_with_combine is (\d+\.\d) points behind that of "
        r"gradient_allreduce, more than 1\.5; train longer",
        done.stderr,
    )
    assert behind, done
    assert float(behind[1]) > 1.5


@pytest.mark.slow
@pytest.mark.mpi(4)
def test_average_model_keeps_up_with_the_centralised_one(tmp_path):
    """The whole run: within 1.5 points, as the script itself insists."""
    done = run_digits(4, cwd=tmp_path)
    assert done.code == 0, done
    decentralised, centralised, alone = map(number, table_of(done)["average model"])
    assert decentralised >= centralised - 1.5
    assert min(centralised, alone) > 95
