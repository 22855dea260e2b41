"""Whole scripts of BlueFog, in our words, run when their two import lines are changed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_to_end, warm_script

SCRIPTS = Path(__file__).parent / "bluefog_scripts"
CHANGED = {
    "import bluefog.torch as bf\n": "import asyncddp.integrations.bluefog as bf\n",
    "from bluefog.common import topology_util\n": (
        "from asyncddp.integrations.bluefog import topology_util\n"
    ),
}


def run_script(name, folder, **environ):
    """What a script prints on four ranks: rank and key → number."""
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    for old, new in CHANGED.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert "bluefog.torch" not in text
    script = folder / name
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "asyncddp", "run", "-np", "4", *warm_script(str(script))]
    done = run_to_end(command, cwd=folder, environ=environ)
    assert done.code == 0, done
    assert not done.left
    rows = re.findall(r"rank (\d), (.*): (\S+)$", done.stdout, flags=re.MULTILINE)
    return {(int(rank), key): float(number) for rank, key, number in rows}


@pytest.mark.mpi(4)
def test_average_consensus(tmp_path):
    """Every way ends at the mean of all ranks' vectors, and push-sum's p has mean 1."""
    found = run_script("average_consensus.py", tmp_path)
    ways = ["exponential", "one-way ring", "weighted star", "complete", "one peer"]
    ways += ["push-sum", "push-sum, one peer", "mean of p"]
    assert set(found) == {(rank, way) for rank in range(4) for way in ["start", *ways]}
    assert all(found[rank, "start"] > 0.1 for rank in range(4))
    assert {key: number for key, number in found.items() if number > 1e-11} == {
        key: number for key, number in found.items() if key[1] == "start"
    }


@pytest.mark.nightly
@pytest.mark.mpi(4)
def test_digits(tmp_path):
    """Every optimizer learns the digits, and all ranks learn the same about how well."""
    found = run_script("digits.py", tmp_path, BLUEFOG_NODES_PER_MACHINE="2")
    kinds = {kind for _, kind in found}
    assert len(kinds) == 3
    assert {kind: found[0, kind] for kind in kinds if found[0, kind] < 0.6} == {}
    assert all(found[rank, kind] == found[0, kind] for kind in kinds for rank in range(4))
