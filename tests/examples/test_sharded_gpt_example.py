"""examples/sharded_gpt.py: sharded replicas learn by each method, and say what they have sent."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO, run_to_end, warm_script

SCRIPT = str(REPO / "examples" / "sharded_gpt.py")
NUMBERS = re.compile(r"held-out loss ([\d.]+).* ([\d.]+) MB between .*distance ([\d.e-]+)")


@pytest.mark.parametrize(
    "method",
    [
        "diloco",
        pytest.param("noloco", marks=pytest.mark.nightly),
        pytest.param("one_peer", marks=pytest.mark.nightly),
        pytest.param("choco_sgd", marks=pytest.mark.nightly),
        pytest.param("hsdp", marks=pytest.mark.nightly),
    ],
)
def test_replicas_of_two_shards_learn(method: str, tmp_path: Path) -> None:
    """The loss falls below that of bytes at random, and replicas send less than all of a model."""
    words = ["--replicas", "2", "--shards", "2", "--method", method, "--smoke"]
    command = [sys.executable, "-m", "asyncddp", "run", "-np", "4", *warm_script(SCRIPT, *words)]
    done = run_to_end(command, cwd=tmp_path, timeout=200)
    assert done.code == 0, done
    found = NUMBERS.search(done.stdout)
    assert found is not None, done
    loss, sent, distance = map(float, found.groups())
    assert loss < 5.6  # log(256) = 5.55 before the first step, and more with random weights
    parameters = int(re.search(r"(\d+) parameters", done.stdout)[1])
    assert 0 < sent * 1e6 < 1.1 * 4 * parameters / 2
    assert (distance > 0.0) is (
        method in ("noloco", "choco_sgd")
    )  # the others have just averaged all


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """The message says how many ranks the mesh needs."""
    words = ["--replicas", "2", "--shards", "2", "--smoke"]
    command = [sys.executable, "-m", "asyncddp", "run", "-np", "2", *warm_script(SCRIPT, *words)]
    done = run_to_end(command, cwd=tmp_path, timeout=200)
    assert done.code != 0
    assert "2 replicas x 2 shards = 4 ranks, got 2" in done.stderr + done.stdout
