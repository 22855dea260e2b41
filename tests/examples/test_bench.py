"""scripts/bench measures all rivals side by side, and says which could not run or are wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.processes import REPO, Finished, run_to_end, warm_server

PNG = b"\x89PNG\r\n\x1a\n"
OURS = ("asyncddp", "asyncddp, out=", "asyncddp in place")
SIZES = {4096, 4194304}
RIVALS = {
    "one_peer": (*OURS, "mpi4py", "gloo", "limit", "floor"),
    "exp2": (*OURS, "mpi4py", "gloo", "limit", "floor"),  # on two ranks one peer, too
    "allreduce": (*OURS, "MPI", "gloo", "neighbor_allreduce"),
    "reduce_scatter": ("asyncddp", "asyncddp, out=", "MPI", "gloo"),
    "transport_exchange": ("mpi", "c10d", "gloo"),
    "transport_sum": ("mpi", "c10d", "gloo"),
    "allgather": ("asyncddp", "MPI", "gloo"),
    "small": (
        "200 non-blocking calls",
        "one call on the concatenation",
        "one call with a list",
        "a list in one storage, in place",
        "cat, one call, split",
        "200 blocking calls",
    ),
    "caller": ("a call alone", "each of 200 in a row"),
}
METHODS = (
    "local step",
    "DDP gloo",
    "DDP gloo, static_graph",
    "DDP gloo, gradient_as_bucket_view",
    "gradient_allreduce",
    "adapt_with_combine, exp-2",
    "adapt_with_combine, one-peer",
    "adapt_then_combine, exp-2",
    "adapt_then_combine, one-peer",
    "adapt_then_combine in backward, one-peer",
)
STEPS = ("step_mlp", "step_convnet", "step_transformer")


@pytest.fixture
def contract(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    from benchmarks import tables

    return tables


def run_bench(*arguments: str, cwd: Path, **environ: str) -> Finished:
    command = [str(REPO / "scripts" / "bench"), *arguments]
    place = {"ASYNCDDP_VENV": warm_server().environment}
    return run_to_end(command, cwd=cwd, environ={**place, **environ})


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    "benches", [("ops",), pytest.param(("ops", "step"), marks=pytest.mark.nightly)], ids=" ".join
)
def test_quick_run_prints_tables_and_writes_json_and_plot(tmp_path, benches):
    """Every table has every size and rival, every aim is judged, and the reports agree."""
    files = ("--json", "out.json", "--plot", "out.png")
    done = run_bench(*benches, "--quick", "--rounds", "2", *files, cwd=tmp_path)
    assert done.code == 0, done
    assert not done.left
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["header"]["ranks"] == 2
    assert found["header"]["rounds"] == 2
    assert found["header"]["processor"]
    assert found["header"]["caches"]
    rows = found["results"]
    assert all(len(row["rounds"]) == 2 and min(row["rounds"]) > 0 for row in rows)
    for key, names in RIVALS.items():
        assert {row["rival"].split(":")[0] for row in rows if row["table"] == key} == set(names)
    shared = {row["rival"].split(":")[0] for row in rows if row["table"] == "shared"}
    left_out = set(
        re.findall(r"^(asyncddp.*) was not measured: .+", done.stdout, flags=re.MULTILINE)
    )
    assert shared == {"asyncddp in place", "asyncddp, out=", "limit"} - left_out
    assert {row["bytes"] for row in rows if row["table"] == "one_peer"} == SIZES
    for key in STEPS if "step" in benches else ():
        assert [row["rival"] for row in rows if row["table"] == key] == list(METHODS)
    assert len(re.findall(r"^\| +4 MB \|", done.stdout, flags=re.MULTILINE)) == 7
    marked = re.findall(r"✓|MISSED|\(not judged\)", done.stdout.partition("aims are met.")[0])
    assert len(marked) == len(found["aims"]) > 0
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


@pytest.fixture(scope="module")
def without_gloo(tmp_path_factory):
    """What is printed by two benches in one run, in which gloo's interface is missing."""
    folder = tmp_path_factory.mktemp("without")
    rounds = ("--quick", "--rounds", "2")
    done = run_bench("windows", "step", *rounds, cwd=folder, GLOO_SOCKET_IFNAME="nope0")
    assert done.code == 0, done
    return done.stdout


@pytest.mark.mpi(2)
def test_a_rival_that_cannot_run_is_named_with_the_reason(without_gloo):
    """Without gloo's interface the others are measured; an aim against gloo is not won by that."""
    text = " ".join(without_gloo.split())
    assert text.count("DDP gloo was not measured: gloo does not start") == 3
    assert text.count("DDP gloo, static_graph was not measured") == 3
    assert "samples/s ≥ 1.1 x DDP gloo (not judged)" in without_gloo.partition("aims are met.")[2]


@pytest.mark.mpi(2)
def test_another_bench_follows_windows_in_the_same_run(without_gloo):
    """Windows are gone when their bench is through: they would keep the topology as it is."""
    assert without_gloo.index("win_put + win_update") < without_gloo.index("local step")
    assert len(re.findall(r"^\| +local step \|", without_gloo, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (),
            "There are: ops windows step timeline torch-distributed network network-steps "
            "network-methods network-cost network-gpt one-to-n sharded scale elastic memory "
            "lightning methods compression gpu",
        ),
        (("nope",), "no bench 'nope'; there are: ops windows step timeline"),
        (("ops", "--ranks", "1"), "--ranks needs a number of at least 2"),
        (("ops", "--json", "/no/such/folder/x"), "--json needs a file in a folder that exists"),
        (("ops", "--fast"), "no option '--fast'"),
        (("ops", "--with-torchft"), "--with-torchft is for elastic or sharded alone, not for: ops"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(tmp_path, arguments, words):
    """scripts/bench exits with 1 and tells on stderr what it expects."""
    done = run_bench(*arguments, cwd=tmp_path)
    assert done.code == 1
    assert words in done.stderr


def test_benches_with_ranks_of_their_own_run_after_the_others_with_files_of_their_own(tmp_path):
    """No run overwrites another's files, and ``ops`` and ``step`` share one, whatever the order."""
    (tmp_path / "bin").mkdir()
    for name in ("asyncddp", "python"):
        tool = tmp_path / "bin" / name
        tool.write_text(
            f'#!/bin/sh\n[ "$1" != -c ] || echo 1\n'
            f'case "$*" in *-m*) echo "{name} $*" >>{tmp_path}/calls ;; esac\n'
        )
        tool.chmod(0o755)
    names = ("scale", "step", "network", "ops")
    files = ("--json", "a.b/out.json", "--plot", "out")
    (tmp_path / "a.b").mkdir()
    done = run_bench(*names, *files, "--quick", cwd=tmp_path, ASYNCDDP_VENV=str(tmp_path))
    assert done.code == 0, done
    run, with_scale, *networks = (tmp_path / "calls").read_text().splitlines()
    assert run.endswith("-m benchmarks step ops --quick --json a.b/out.json --plot out")
    start = "python -m benchmarks "
    assert with_scale == f"{start}scale --quick --json a.b/out-scale.json --plot out-scale"
    for part, call in zip(("steps", "methods", "cost", "gpt"), networks, strict=True):
        own = f"--json a.b/out-network-{part}.json --plot out-network-{part}"
        assert call == f"{start}network-{part} --quick {own}"


def measure_alone(contract, table, *, rounds=3, sample=1e-9):
    from benchmarks.compression import OneRank
    from benchmarks.harness import measure

    return measure(contract.RankGroup(OneRank(), None), table, rounds=rounds, sample=sample)


def test_a_rival_with_a_wrong_result_is_not_timed(contract):
    """Every rival's first result is compared with the table's; a fast wrong one cannot win."""
    right, wrong = torch.ones(2), torch.zeros(2)
    rivals = [
        contract.Rival("right", lambda nbytes: lambda number: right),
        contract.Rival("in parts", lambda nbytes: lambda number: [right[:1], right[1:]]),
        contract.Rival("begun", lambda nbytes: lambda number: wrong, finish=lambda begun: right),
        contract.Rival("wrong", lambda nbytes: lambda number: wrong),
        contract.Rival("not comparable", lambda nbytes: lambda number: wrong, checked=False),
    ]
    table = contract.TimingTable("t", "T", [8], rivals, expected=lambda nbytes: right)
    rows, missing = measure_alone(contract, table)
    assert [row.rival for row in rows] == ["right", "in parts", "begun", "not comparable"]
    assert missing == {"wrong": "its result is wrong"}


def test_rivals_take_turns_forth_and_back(contract):
    """A B, B A, A B: nobody always comes first, and all rounds have equally many calls."""
    order: list[str] = []

    def rival(name):
        def call(number):
            order.append(name)
            return torch.zeros(1)

        return contract.Rival(name, lambda nbytes: call)

    table = contract.TimingTable("t", "T", [4], [rival("a"), rival("b")])
    rows, _ = measure_alone(contract, table, rounds=4)
    assert [row.calls for row in rows] == [1, 1]
    assert "".join(order).endswith("abbaabba")


def test_what_leads_and_what_ends_a_call_is_off_the_clock(contract):
    """Of a round's two calls the second is timed, without its end, and divided by its parts."""
    import time

    def call(number):
        time.sleep(0.02)

    rival = contract.Rival("r", lambda nbytes: call, finish=lambda begun: time.sleep(0.2), parts=10)
    rows, _ = measure_alone(
        contract, contract.TimingTable("t", "T", [4], [rival], lead=1), rounds=2
    )
    assert 0.002 <= rows[0].median < 0.02


def test_buffers_of_a_size_are_gone_when_the_next_one_is_measured(contract):
    """The largest sizes of all rivals would not fit into the memory together with the others."""
    import weakref

    alive = weakref.WeakSet()

    def prepare(nbytes):
        assert not alive
        buffer = torch.zeros(nbytes)
        alive.add(buffer)
        return lambda number: buffer

    table = contract.TimingTable("t", "T", [4, 8, 16], [contract.Rival("r", prepare)])
    rows, _ = measure_alone(contract, table)
    assert [row.nbytes for row in rows] == [4, 8, 16]


def test_spread_is_half_the_distance_of_the_quartiles_over_the_median(contract):
    """The spread of rounds is (upper quartile - lower quartile) / (2 * median)."""
    row = contract.TimingRow("t", "r", 4, 1, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert row.median == 3
    assert row.quartiles == (2, 4)
    assert row.spread == pytest.approx(1 / 3)
