"""scripts/bench scale counts what ranks send, inside MPI and at the transport, beside the model."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.support.processes import REPO, run_to_end, warm_python

SCRIPTS = str(REPO / "scripts")
PATH = os.pathsep.join((SCRIPTS, str(REPO)))
TENSOR = 1 << 16
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.mark.nightly
def test_quick_run_prints_all_tables_and_writes_json_and_plot(tmp_path):
    """Ranks, verbs and starts have their lines, and one-peer's aim is judged in each world."""
    command = [sys.executable, "-m", "benchmarks", "scale", "--quick", "--rounds", "2"]
    command += ["--json", "out.json", "--plot", "out.png"]
    done = run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    found = json.loads((tmp_path / "out.json").read_text())
    counted, local_worlds, oversubscribed = found["sheets"]
    verbs = ["one-peer", "exp-2", "ring"]
    assert [line["cells"][:2] for line in counted["lines"]] == [
        *(["2 processes", verb] for verb in (*verbs, "allreduce")),
        *(["8 threads", verb] for verb in verbs),
    ]
    assert [line["met"] for line in counted["lines"] if line["aim"]] == [True, True]
    works = ["world, barrier, allreduce", "10 one-peer averages"]
    assert [line["cells"][:2] for line in local_worlds["lines"]] == [
        ["8 threads", work] for work in works
    ]
    works = [
        "MPI's start and init()",
        "the same and loading asyncddp",
        "one-peer average",
        "allreduce",
    ]
    assert [line["cells"][:2] for line in oversubscribed["lines"]] == [
        ["4 processes", work] for work in works
    ]
    for line in oversubscribed["lines"]:  # whose aim depends on who else is on this machine
        assert line["met"] is (line["cells"][-1] <= 2)
    assert found["header"]["transport"] == "mpi"
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


@pytest.mark.mpi(2)
def test_the_transport_sees_all_that_mpi_sends_for_neighbors_and_nothing_of_allreduce():
    """Bytes and messages of both counters agree on every rank, to the byte."""
    from benchmarks.scale.bench import in_processes

    counted = in_processes(2, TENSOR, calls=3)
    assert len(counted.found) == 2
    for rank in counted.found:
        for verb in ("one-peer", "exp-2", "ring"):
            transport, mpi = rank[verb]["transport"], rank[verb]["mpi"]
            assert transport["nbytes"] == mpi["nbytes"]
            assert transport["messages"] == mpi["messages"]
        sent = rank["allreduce"]
        assert sent["transport"]["messages"] == sent["transport"]["headers"]
        assert sent["mpi"]["nbytes"] >= 3 * TENSOR


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_peer_sends_one_tensor_exp2_sends_log2_n_ring_sends_two(ranks):
    """The closed forms, on every rank and for every call; what is more is headers."""
    from benchmarks.scale.bench import in_threads

    calls = 3
    tensors = {"one-peer": 1, "exp-2": ranks.bit_length() - 1, "ring": min(2, ranks - 1)}
    for rank in in_threads(ranks, TENSOR, calls).found:
        for verb, many in tensors.items():
            sent = rank[verb]["transport"]
            assert sent["messages"] - sent["headers"] == calls * many
            headers = sent["nbytes"] - calls * many * TENSOR
            assert 0 <= headers <= 4096 * calls * many


def test_without_its_monitoring_open_mpi_is_not_believed():
    """The run says why allreduce is not counted, instead of showing zeros."""
    from benchmarks.ranks import run_on_ranks

    given = {"nbytes": 4096, "calls": 2}
    found = run_on_ranks(2, "scale.message_counts:count_on_ranks", given)
    assert "started without its monitoring" in found["why"]
    assert [rank["allreduce"]["mpi"] for rank in found["ranks"]] == [None, None]


def test_the_model_is_one_tensor_for_one_peer_and_two_shares_short_of_two_for_the_ring():
    """One-peer: B for any n; exp-2: B log2 n; ring allreduce: 2 B (n - 1) / n."""
    from benchmarks.scale.bench import compute_model_costs

    for one in compute_model_costs((2, 16, 1024), TENSOR, lambda text: None):
        found = {way: cost.bytes_per_rank / TENSOR for way, cost in one.costs.items()}
        assert found["one-peer"] == 1
        assert found["exp-2"] == one.ranks.bit_length() - 1
        assert found["ring allreduce"] == pytest.approx(2 * (one.ranks - 1) / one.ranks)


def test_a_run_that_fails_ends_the_bench_with_its_last_words():
    """RunFailedError tells the exit code and what the run wrote on stderr."""
    from benchmarks.ranks import RunFailedError, run_for_json

    with pytest.raises(RunFailedError, match=r"ended with 3:\nno luck"):
        run_for_json(
            [sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"]
        )
