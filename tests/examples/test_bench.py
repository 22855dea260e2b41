"""scripts/bench measures all rivals side by side, and says which could not run or are wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import REPO, Finished, run_to_end

PNG = b"\x89PNG\r\n\x1a\n"
TITLES = {
    "one_peer": "neighbor_allreduce, one peer per call",
    "exp2": "neighbor_allreduce, exponential-2 graph",
    "allreduce": "allreduce, average",
    "step": "a step of an MLP, batch of 32",
}


@pytest.fixture
def contract(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    from benchmarks import contract

    return contract


def run_bench(*arguments: str, cwd: Path, **environ: str) -> Finished:
    command = [str(REPO / "scripts" / "bench"), *arguments]
    environ["ASYNCDDP_VENV"] = sys.prefix
    return run_to_end(command, cwd=cwd, timeout=110, environ=environ)


@pytest.mark.mpi(2)
def test_quick_run_prints_tables_and_writes_json_and_plot(tmp_path):
    """Every table has every size; every rival is measured; the three reports agree."""
    files = ("--json", "out.json", "--plot", "out.png")
    done = run_bench("ops", "--quick", "--rounds", "2", *files, cwd=tmp_path)
    assert done.code == 0, done
    assert not done.left
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["header"]["ranks"] == 2
    assert found["header"]["rounds"] == 2
    assert {row["table"] for row in found["results"]} == set(TITLES)
    assert all(len(row["rounds"]) == 2 and min(row["rounds"]) > 0 for row in found["results"])
    one_peer = [row for row in found["results"] if row["table"] == "one_peer"]
    assert len({row["rival"] for row in one_peer}) == 5
    assert {row["bytes"] for row in one_peer} == {4, 4096, 262144, 4194304}
    assert all(title in done.stdout for title in TITLES.values())
    assert len(re.findall(r"^\| +4 MB \|", done.stdout, flags=re.MULTILINE)) == 3
    assert "not measured" not in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


@pytest.mark.mpi(2)
def test_a_rival_that_cannot_run_is_named_with_the_reason(tmp_path):
    """Without gloo's interface the others are measured all the same."""
    done = run_bench("ops", "--quick", "--rounds", "2", cwd=tmp_path, GLOO_SOCKET_IFNAME="nope0")
    assert done.code == 0, done
    text = " ".join(done.stdout.split())
    assert "gloo batch_isend_irecv + lerp was not measured: gloo does not start" in text
    assert "gloo all_reduce + div in place was not measured" in text
    assert len(re.findall(r"^\| +4 MB \|", done.stdout, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which one? There are: ops"),
        (("nope",), "no bench 'nope'; there are: ops"),
        (("ops", "--ranks", "1"), "--ranks needs a number of at least 2"),
        (("ops", "--json", "/no/such/folder/x"), "--json needs a file in a folder that exists"),
        (("ops", "--fast"), "no option '--fast'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(tmp_path, arguments, words):
    done = run_bench(*arguments, cwd=tmp_path)
    assert done.code == 1
    assert words in done.stderr


class OneRank:
    """What the harness asks of a communicator, for one rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    def Barrier(self):
        pass

    def Ibarrier(self):
        return self

    def Test(self):
        return True


def test_a_rival_with_a_wrong_result_is_not_timed(contract):
    """Every rival's first result is compared with the table's; a fast wrong one cannot win."""
    from benchmarks.harness import measure

    right, wrong = torch.ones(2), torch.zeros(2)
    rivals = [
        contract.Rival("right", lambda nbytes: lambda number: right),
        contract.Rival("wrong", lambda nbytes: lambda number: wrong),
    ]
    table = contract.Table("t", "T", [8], rivals, expected=lambda nbytes: right)
    world = contract.World(OneRank(), None)
    rows, missing = measure(world, table, rounds=3, sample=1e-4, advance=lambda nbytes: None)
    assert [row.rival for row in rows] == ["right"]
    assert missing == {"wrong": "its result is wrong"}


def test_rivals_take_turns_forth_and_back(contract):
    """A B, B A, A B: nobody always comes first, and all rounds have equally many calls."""
    from benchmarks.harness import measure

    order: list[str] = []

    def rival(name):
        def call(number):
            order.append(name)
            return torch.zeros(1)

        return contract.Rival(name, lambda nbytes: call)

    table = contract.Table("t", "T", [4], [rival("a"), rival("b")])
    world = contract.World(OneRank(), None)
    rows, _ = measure(world, table, rounds=4, sample=1e-9, advance=lambda nbytes: None)
    assert [row.calls for row in rows] == [1, 1]
    assert "".join(order).endswith("abbaabba")


def test_spread_is_half_the_distance_of_the_quartiles_over_the_median(contract):
    row = contract.Row("t", "r", 4, 1, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert row.median == 3
    assert row.quartiles == (2, 4)
    assert row.spread == pytest.approx(1 / 3)
