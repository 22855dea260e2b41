"""The extras for GPUs: what they ask for, and that pip finds it for every Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncddp.cli.doctor import package_checks as package_findings

REPO = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.13")  # the oldest, and the newest that all wheels are for


def extra(name):
    declared = (REPO / "pyproject.toml").read_text()
    return re.findall(r'"([^"]+)"', re.search(rf"^{name} = \[(.*)\]$", declared, re.MULTILINE)[1])


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_an_extra_asks_for_cupy_alone(cuda):
    """NCCL comes with torch, which pins it: the wheels of two CUDA versions hold the same file."""
    (wanted,) = extra(f"cuda{cuda}")
    assert re.fullmatch(rf"cupy-cuda{cuda}x>=[0-9.]+", wanted)
    assert wanted.partition(">=")[0] in package_findings._CUPY


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("cuda", ["12", "13"])
def test_pip_finds_wheels_for_every_python(cuda, python):
    """By the index's list of wheels, of which none is fetched; skipped where there is no index."""
    (wanted,) = extra(f"cuda{cuda}")
    name, least = wanted.split(">=")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "index", "versions", name, "--only-binary=:all:"),
            *("--python-version", python, "--platform", "manylinux2014_x86_64"),
            *("--retries", "0", "--timeout", "10"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = re.search(r"Available versions: (.*)", done.stdout)
    if found is None:
        problem = (done.stderr.strip().splitlines() or ["no words"])[-1]
        pytest.skip(f"pip reaches no index that has {name}: {problem}")
    assert any(number(version) >= number(least) for version in found[1].split(", "))


def number(version):
    return [int(part) for part in re.findall(r"\d+", version)[:2]]
