"""DDP, FSDP2, DTensor, ZeRO, checkpoints, Join, objects: the same as on gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support import run_on_mpirun

SCRIPT = "from tests.torch_distributed import training_cases\ntraining_cases.compare()\n"


@pytest.mark.launches
@pytest.mark.parametrize(
    ("ranks", "allowed"),
    [
        (2, {"equal"}),
        pytest.param(4, {"equal", "near"}, marks=pytest.mark.torch_suite),
    ],
)
def test_all_that_builds_on_groups_agrees_with_gloo(
    ranks: int, allowed: set[str], tmp_path: Path
) -> None:
    """To the last bit where a sum has one order, that of two ranks; else to 1e-6."""
    forks = torch.__version__ >= "2.8"  # before, a fork's compiler does not end
    ended = run_on_mpirun(ranks, SCRIPT, tmp_path, warm=forks)
    assert ended.code == 0, ended
    found = re.findall(r"rank \d+ (\w+): (\w+)", ended.stdout)
    names = {name for name, _ in found}
    assert len(names) >= 13, ended
    assert len(found) == ranks * len(names), ended
    assert {outcome for _, outcome in found} <= allowed, ended
