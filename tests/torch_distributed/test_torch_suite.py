"""Torch's own tests of a backend pass: a subset here, all of them by ``scripts/test torch``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import run_to_end

pytest.importorskip("expecttest", reason="torch's own tests need expecttest, of the extra dev")

RUNNER = Path(__file__).with_name("torch_suite_runner.py")
LEAST_PASSED = 96
SUBSET = """
    test_all_gather test_all_gather_coalesced_with_empty test_all_gather_object_default_pg
    test_all_reduce_complex_unsupported_ops test_all_reduce_group_max test_all_reduce_product
    test_all_reduce_sum_async test_all_to_all_group test_all_to_all_single_unequal_split
    test_barrier_full_group test_broadcast_group test_ddp_static_graph_nested_types
    test_gather_full_group test_isend test_reduce_scatter_tensor_cuda test_scatter_object_list
    test_send_recv_any_source test_sync_bn_logged
"""


def run_suite(names: list[str], limit: float) -> dict[str, str]:
    """Run tests of torch on four ranks, and return the outcome of each."""
    command = ["asyncddp", "run", "-np", "4", str(RUNNER), *names]
    ended = run_to_end(command, timeout=limit)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert ended.code == 0, ended
    assert len(lines) == 1, ended
    found: dict[str, str] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.launches
def test_subset_of_torchs_own_tests_passes() -> None:
    """One or two tests of each kind of verb, and DDP."""
    found = run_suite(SUBSET.split(), 120.0)
    assert not {name: text for name, text in found.items() if text.startswith("failed")}
    assert sum(text == "passed" for text in found.values()) >= 14, found


@pytest.mark.torch_suite
def test_torchs_own_tests_pass() -> None:
    """Only tests that ask for the name of a built-in backend may fail; none hangs."""
    found = run_suite([], 1800.0)
    failed = {name: text for name, text in found.items() if text.startswith("failed")}
    passed = [name for name, text in found.items() if text == "passed"]
    assert not failed.keys() - {"test_Backend_enum_class"}, failed
    assert len(passed) >= LEAST_PASSED, found
