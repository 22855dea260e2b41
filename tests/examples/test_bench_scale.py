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


def test_a_run_that_fails_ends_the_bench_with_its_last_words():
    """RunFailedError tells the exit code and what the run wrote on stderr."""
    from benchmarks.ranks import RunFailedError, run_for_json

    with pytest.raises(RunFailedError, match=r"ended with 3:\nno luck"):
        run_for_json(
            [sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"]
        )
