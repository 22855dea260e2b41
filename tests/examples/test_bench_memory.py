"""scripts/bench memory: what a step holds at its peak, from Linux's account of each process."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.processes import REPO, run_to_end, warm_python

PATH = os.pathsep.join((str(REPO / "scripts"), str(REPO)))
PNG = b"\x89PNG\r\n\x1a\n"


def test_quick_run_prints_the_table_and_writes_json_and_plot(tmp_path):
    """A local step holds next to nothing beyond the three models; AWC is judged beside it."""
    command = [warm_python(), "-m", "benchmarks", "memory", "--quick", "--rounds", "4"]
    command += ["--json", "out.json", "--plot", "out.png"]
    done = run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert done.code == 0, done
    (sheet,) = json.loads((tmp_path / "out.json").read_text())["sheets"]
    local, awc = sheet["lines"]
    assert local["cells"][0] == "local step"
    assert -0.1 < local["cells"][2] < 0.75  # what a fork shares counts for fewer as others end
    assert local["aim"] is None
    assert awc["cells"][0] == "one-peer AWC"
    assert awc["cells"][3] == pytest.approx(awc["cells"][2] - local["cells"][2])
    assert awc["aim"] == "≤ 0.25 models"
    assert awc["met"] == (awc["cells"][3] <= 0.25)
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)
