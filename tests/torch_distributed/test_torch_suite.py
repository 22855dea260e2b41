"""Torch's own tests of a backend pass: a subset here, all of them by ``scripts/test torch``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import Finished, run_on_mpirun, run_to_end

pytest.importorskip("expecttest", reason="torch's own tests need expecttest, of the extra dev")

RUNNER = Path(__file__).with_name("torch_suite_runner.py")
LEAST_PASSED = 96
LIMIT = 1800.0  # seconds
SUBSET = """
    test_DistributedDataParallelCPU test_accumulate_gradients_no_sync_allreduce_with_then_hook
    test_all_gather_coalesced_complex test_all_gather_group test_all_reduce_group_max
    test_all_reduce_sum_async test_all_to_all_single_unequal_split_complex test_barrier_group
    test_broadcast_full_group test_ddp_create_graph test_destroy_group test_gather_group test_isend
    test_reduce_sum_twice test_scatter_complex
    test_send_recv_any_source test_send_recv_with_tag test_static_graph_api_cpu
"""
WARM = "from tests.torch_distributed import torch_suite_runner\ntorch_suite_runner.main({names})\n"


def outcomes_of(ended: Finished) -> dict[str, str]:
    """Return the outcome of each test of a run."""
    assert ended.code == 0, ended
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, ended
    found: dict[str, str] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.launches
def test_subset_of_torchs_own_tests_passes(tmp_path: Path) -> None:
    """One or two tests of each kind of verb, and DDP."""
    names = SUBSET.split()
    found = outcomes_of(run_on_mpirun(4, WARM.format(names=names), tmp_path))
    assert found == dict.fromkeys(names, "passed")


@pytest.mark.torch_suite
def test_torchs_own_tests_pass() -> None:
    """Only the one that asks for the backend's name fails; none hangs."""
    command = [sys.executable, "-m", "asyncddp", "run", "-np", "4", str(RUNNER)]
    found = outcomes_of(run_to_end(command, timeout=LIMIT))
    failed = {name: text for name, text in found.items() if text.startswith("failed")}
    passed = [name for name, text in found.items() if text == "passed"]
    assert failed.keys() <= {"test_get_backend"}, failed
    assert len(passed) >= LEAST_PASSED, found
