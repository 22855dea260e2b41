"""examples/ray_train.py, on a Ray of this machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.packages import need
from tests.support.processes import REPO, run_to_end

need("ray")

TOO_SLOW = "The current node timed out during startup"
"""What Ray says where its own processes have not started within 15 seconds."""


def test_workers_of_ray_join_and_report_the_average(tmp_path: Path) -> None:
    """Two workers average with each other; Ray has the average; none of its processes is left."""
    mark = {"ASYNCDDP_TEST_MARK": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    folder = tempfile.mkdtemp(prefix="ray")  # short, since Ray's sockets are in it
    script = [sys.executable, str(REPO / "examples" / "ray_train.py"), "--smoke"]
    try:
        environ = {**mark, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        done = run_to_end(script, cwd=tmp_path, timeout=300, environ=environ)
        left = [one.pid for one in psutil.process_iter() if is_marked(one, str(tmp_path))]
        for process in left:
            os.kill(process, 9)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if TOO_SLOW in done.stderr:
        pytest.skip("Ray did not start within the 15 seconds that it gives itself")
    assert done.code == 0, done
    assert not left
    lines = re.sub(r"\d+\.\d+", "#", done.stdout).splitlines()[-2:]
    assert lines == [
        "2 ranks trained by adapt_then_combine; the average model has loss #",
        "its checkpoint has 0.bias, 0.weight, 2.bias, 2.weight",
    ]


def is_marked(process: psutil.Process, mark: str) -> bool:
    """Whether a process was started by a run."""
    try:
        return process.environ().get("ASYNCDDP_TEST_MARK") == mark
    except psutil.Error:
        return False
