"""examples/lightning_digits.py: what it prints and leaves, at small size."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.packages import need
from tests.support.processes import REPO, run_to_end, warm_script

need("lightning")

SCRIPT = str(REPO / "examples" / "lightning_digits.py")


@pytest.mark.mpi(2)
def test_trains_resumes_and_reads_the_distances(tmp_path: Path) -> None:
    """The second Trainer goes on from each rank's own file, and no process is left."""
    run = (sys.executable, "-m", "asyncddp", "run", "-np", "2")
    done = run_to_end(
        [*run, *warm_script(SCRIPT, "--smoke", frameworks=True)], cwd=tmp_path, timeout=200
    )
    assert done.code == 0, done
    assert not done.left
    lines = [re.sub(r"\d+\.\d+", "#", line) for line in done.stdout.splitlines()]
    folder = "lightning_digits"
    checkpoint = tmp_path / folder / "checkpoints" / "last.ckpt"
    assert lines == [
        "2 ranks train by adapt_then_combine",
        "epoch   1:  # % right",
        f"a second Trainer resumes from {checkpoint}, each rank from its own file beside it",
        "epoch   2:  # % right",
        "rank_0 is # from the average model",
        "rank_1 is # from the average model",
        f"the average model has # % right; all figures are in {folder}/logs/version_1/metrics.csv",
    ]
    assert {Path(f"{checkpoint}.rank{rank}").is_file() for rank in range(2)} == {True}
    assert "Error" not in done.stderr, done
