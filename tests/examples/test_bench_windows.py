"""scripts/bench windows measures windows beside averages and MPI's own one-sided verbs."""

from __future__ import annotations

import json
import re

import pytest

from tests.examples.test_bench import run_bench

RIVALS = {
    "win_put + win_update",
    "neighbor_allreduce",
    "neighbor_allreduce_ (in place)",
    "MPI.Win: Put, Flush + lerp",
    "win_put",
    "win_update",
    "limit: local lerp",
}
SIZES = {4096, 4194304}


@pytest.mark.nightly
@pytest.mark.mpi(2)
@pytest.mark.parametrize("transport", ["shared_memory", "mpi"])
def test_every_rival_at_every_size_with_a_right_first_result(tmp_path, transport):
    """Its first results are checked against the graph's average; aims are judged."""
    done = run_bench(
        "windows",
        "--quick",
        "--rounds",
        "2",
        "--json",
        "out.json",
        cwd=tmp_path,
        ASYNCDDP_TRANSPORT=transport,
    )
    assert done.code == 0, done
    assert not done.left
    assert "was not measured" not in done.stdout, done
    found = json.loads((tmp_path / "out.json").read_text())
    rows = found["results"]
    assert {(row["rival"], row["bytes"]) for row in rows} == {
        (rival, size) for rival in RIVALS for size in SIZES
    }
    marked = re.findall(r"✓|MISSED|\(not judged\)", done.stdout.partition("aims are met.")[0])
    assert len(marked) == len(found["aims"])
