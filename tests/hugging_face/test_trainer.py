"""Hugging Face's Trainer and accelerate on ranks of ``asyncddp run``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.packages import need
from tests.support.processes import run_to_end, warm_script

need("transformers")

CASES = str(Path(__file__).with_name("cases.py"))
pytestmark = [pytest.mark.mpi(3), pytest.mark.training]


def run(ranks: int, case: str, folder: Path, *arguments: str) -> None:
    """Run a case on ranks to its end."""
    command = (sys.executable, "-m", "asyncddp", "run", "-np", str(ranks))
    script = warm_script(CASES, case, str(folder), *arguments, frameworks=True)
    environ = {"ASYNCDDP_TIMEOUT": "60"}
    done = run_to_end([*command, *script], cwd=folder, timeout=150, environ=environ)
    assert done.code == 0, done
    assert done.stdout.endswith("done\n"), done
    assert not done.left


@pytest.mark.parametrize(
    "case",
    [
        "trains",
        "sees_the_average",
        "ends_with_the_best",
        "trains_by_epochs_with_any_optimizer",
        "trains_a_part",
        "takes_over",
        "says_what_cannot_be",
        "refuses_sharding",
        "knows_the_same_world",
        "accelerates",
    ],
)
def test_the_trainer(case: str, tmp_path: Path) -> None:
    """See the case in ``cases.py``."""
    run(3, case, tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("adapt_then_combine", {}),
        ("adapt_with_combine", {}),
        ("gradient_tracking", {}),
        ("choco_sgd", {"compression": "top_k"}),
        ("gradient_allreduce", {"compression": "top_k"}),
    ],
)
def test_a_resumed_run_goes_on_exactly(
    algorithm: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Models, moments and what the method remembers are each rank's own again."""
    run(3, "goes_on_exactly", tmp_path, algorithm, json.dumps(options))


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("push_sum", {}), ("async_model_average", {"sync_interval_ms": 5})],
)
def test_asynchronous_methods(algorithm: str, options: dict[str, object], tmp_path: Path) -> None:
    """They pause where all ranks meet, and go on."""
    run(3, "never_waits", tmp_path, algorithm, json.dumps(options))


def test_fewer_ranks_go_on_from_the_average(tmp_path: Path) -> None:
    """Three ranks save, two resume."""
    run(3, "goes_on_on_fewer", tmp_path)
    run(2, "goes_on_on_fewer", tmp_path)
