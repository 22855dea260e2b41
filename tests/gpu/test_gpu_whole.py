"""Whole programs on a GPU: an example's training, and a run under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.examples.test_digits import number, run_digits, table_of
from tests.support import run_to_end

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
POINTS = 1.5


@pytest.mark.timeout(240)
@pytest.mark.parametrize("algorithm", ["adapt_with_combine", "adapt_then_combine"])
def test_digits_learn_on_a_gpu_what_they_learn_on_the_host(tmp_path, algorithm):
    """The same steps on the same images: a few images near the border fall to the other side."""
    tables = []
    for device in ("cpu", "cuda"):
        options = ("--smoke", "--algorithm", algorithm, "--device", device)
        done = run_digits(2, *options, cwd=tmp_path)
        assert done.code == 0, done
        tables.append(table_of(done))
    here, there = tables
    for row in ("average model", "rank 0, saw 0 2 4 6 8", "rank 1, saw 1 3 5 7 9"):
        for one, other in zip(here[row][:2], there[row][:2], strict=True):
            assert number(one) == pytest.approx(number(other), abs=POINTS), row


@pytest.mark.timeout(400)
def test_a_short_run_under_compute_sanitizer(tmp_path):
    """No kernel and no copy touches memory that is none of its own, or is not there any more."""
    if not Path(SANITIZER).exists():
        pytest.skip("compute-sanitizer is not installed; it comes with NVIDIA's CUDA toolkit")
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "86"]
    done = run_to_end([*command, sys.executable, "-m", "tests.gpu.short_run"], timeout=360)
    assert done.code == 0, done
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
