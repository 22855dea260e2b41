"""scripts/bench lightning: batches per second by each strategy, beside Lightning's ddp."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.processes import REPO, run_to_end, warm_python

PATH = os.pathsep.join((str(REPO / "scripts"), str(REPO)))


@pytest.mark.nightly
@pytest.mark.mpi(2)
@pytest.mark.launches
def test_quick_run_has_a_row_for_each_strategy(tmp_path):
    """Ratios are formed against ddp, and against the same strategy beside a late rank."""
    command = [
        warm_python(frameworks=True),
        "-m",
        "benchmarks",
        "lightning",
        "--quick",
        "--json",
        "out.json",
    ]
    done = run_to_end([*command, "--plot", "out.png"], cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    (sheet,) = json.loads((tmp_path / "out.json").read_text())["sheets"]
    ddp, *others = sheet["lines"]
    assert ddp["cells"][:3] == ["Lightning's ddp, gloo", ddp["cells"][1], 1]
    assert [one["cells"][0] for one in others][:1] == ["gradient_allreduce"]
    for one in others:
        _, alone, share, beside, left = one["cells"]
        assert share == pytest.approx(alone / ddp["cells"][1])
        assert left == pytest.approx(beside / alone)
        limit = 0.8 if "80%" in one["aim"] else 1
        assert one["met"] == ((left if "80%" in one["aim"] else share) >= limit)
    assert (tmp_path / "out.png").stat().st_size > 0
