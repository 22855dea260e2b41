"""examples/finetune_trainer.py: what it prints and leaves, at small size, by each launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.packages import need
from tests.support.processes import REPO, run_to_end, warm_script, warm_server

need("transformers")

SCRIPT = [str(REPO / "examples" / "finetune_trainer.py"), "--smoke"]
if torch.cuda.is_available():
    SCRIPT.append("--cpu")


def check(command: list[str], ranks: int, folder: Path) -> None:
    """Run the example, and look at its lines and files."""
    done = run_to_end(command, cwd=folder, timeout=200)
    assert done.code == 0, done
    assert not done.left
    text = re.sub(r"\d+\.\d+", "#", done.stdout)
    lines = [line for line in text.splitlines() if not line.startswith("{")]
    assert lines[:4] == [
        f"{ranks} ranks train by adapt_then_combine",
        "after 10 steps the average model has loss #",
        "a second Trainer resumed, and after 20 steps it is #",
        "the ranks' models are # from the average",
    ], done
    assert lines[4].startswith("it writes: 'The "), done
    first, last = map(float, re.findall(r"(?:loss|it is) (\d+\.\d+)$", done.stdout, re.MULTILINE))
    assert last < first < 6
    own = folder / "finetune_trainer" / "checkpoint-20" / "asyncddp" / "step_0000000020"
    assert len(list(own.glob("rank_*.pt"))) == ranks


@pytest.mark.mpi(2)
def test_under_asyncddp_run(tmp_path: Path) -> None:
    """Ranks of this library's own launcher."""
    run = [sys.executable, "-m", "asyncddp", "run", "-np", "2"]
    check([*run, *warm_script(*SCRIPT, frameworks=True)], 2, tmp_path)


@pytest.mark.nightly
@pytest.mark.mpi(2)
def test_under_torchrun(tmp_path: Path) -> None:
    """Ranks of torch's launcher."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    check([*run, *warm_server(frameworks=True).command(*SCRIPT)], 2, tmp_path)


@pytest.mark.launches
def test_alone(tmp_path: Path) -> None:
    """One process."""
    check(warm_server(frameworks=True).command(*SCRIPT), 1, tmp_path)
