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


def test_digits_learn_on_a_gpu_what_they_learn_on_the_host(tmp_path):
    """The same steps on the same images: a few images near the border fall to the other side."""
    tables = []
    for device in ("cpu", "cuda"):
        options = ("--smoke", "--methods", "ddp", "adapt_with_combine", "adapt_then_combine")
        done = run_digits(2, *options, "--device", device, cwd=tmp_path)
        assert done.code == 0, done
        tables.append(table_of(done)["accuracy at the end"])
    for here, there in zip(*tables, strict=True):
        assert number(here) == pytest.approx(number(there), abs=POINTS)


def test_a_short_run_under_compute_sanitizer(tmp_path):
    """No kernel and no copy touches memory that is none of its own, or is not there any more."""
    if not Path(SANITIZER).exists():
        pytest.skip("compute-sanitizer is not installed; it comes with NVIDIA's CUDA toolkit")
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "86"]
    done = run_to_end([*command, sys.executable, "-m", "tests.gpu.short_run"], timeout=360)
    assert done.code == 0, done
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
