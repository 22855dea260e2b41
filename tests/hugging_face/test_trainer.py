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


def run(ranks: int, folder: Path, *cases: str) -> None:
    """Run cases on ranks to their end."""
    command = (sys.executable, "-m", "asyncddp", "run", "-np", str(ranks))
    script = warm_script(CASES, str(folder), *cases, frameworks=True)
    environ = {"ASYNCDDP_TIMEOUT": "60"}
    done = run_to_end([*command, *script], cwd=folder, timeout=300, environ=environ)
    assert done.code == 0, done
    assert done.stdout.endswith("done\n"), done
    assert not done.left


def test_the_trainer(tmp_path: Path) -> None:
    """See the cases in ``cases.py``; they share the ranks, which import for a second each."""
    run(
        3,
        tmp_path,
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
    )


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Models, moments and what the method remembers are each rank's own again.

    A method with a state for each neighbour, one with compressed differences, and one whose
    models are equal; of all others ``conformance/test_checkpoints.py``.
    """
    methods = [
        ("gradient_tracking", {}),
        ("choco_sgd", {"compression": "top_k"}),
        ("gradient_allreduce", {"compression": "top_k"}),
    ]
    run(3, tmp_path, *(f"goes_on_exactly:{json.dumps(one)}" for one in methods))


def test_asynchronous_methods(tmp_path: Path) -> None:
    """They pause where all ranks meet, and go on."""
    methods = [("push_sum", {}), ("async_model_average", {"sync_interval_ms": 5})]
    run(3, tmp_path, *(f"never_waits:{json.dumps(one)}" for one in methods))


def test_fewer_ranks_go_on_from_the_average(tmp_path: Path) -> None:
    """Three ranks save, two resume."""
    run(3, tmp_path, "goes_on_on_fewer")
    run(2, tmp_path, "goes_on_on_fewer")
