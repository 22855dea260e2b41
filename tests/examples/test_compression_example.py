"""examples/compression.py: what each compressor sends until the same accuracy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.examples.test_digits import number, table_of
from tests.support.processes import REPO, Finished, run_to_end, warm_script, warm_server

SCRIPT = str(REPO / "examples" / "compression.py")
PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10


def run_compression(ranks: int, *options: str, cwd: Path) -> Finished:
    command = [sys.executable, "-m", "asyncddp", "run", "-np", str(ranks)]
    return run_to_end(
        [*command, *warm_script(SCRIPT, *options, frameworks=True)], cwd=cwd, timeout=200
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.mpi(2)
def test_one_bit_differences_reach_the_accuracy_with_far_fewer_bytes(tmp_path):
    """All three learn the digits; what they send stands in the table, the sentence, the picture."""
    runs = ("gradient_allreduce", "bytegrad", "choco_sgd sign")
    done = run_compression(2, "--runs", *runs, "--target", "90", "--out", "c.png", cwd=tmp_path)
    assert done.code == 0, done
    table = table_of(done)
    sent = {name: number(table[name][2]) for name in runs}
    assert all(number(table[name][1]) > 95 for name in runs)
    assert sent["choco_sgd sign"] < sent["gradient_allreduce"] / 15
    assert sent["bytegrad"] < sent["gradient_allreduce"] / 3
    assert number(table["gradient_allreduce"][0]) == pytest.approx(4 * PARAMETERS / 1e3, rel=0.01)
    sentence = done.stdout.splitlines()[-2]
    assert "the fewest bytes by choco_sgd sign" in sentence
    assert f"{table['choco_sgd sign'][2]} KB from each rank" in sentence
    assert imread(tmp_path / "c.png").shape[0] > 400


def test_one_rank_is_told_to_start_more(tmp_path):
    """Where nobody can be sent anything the script says how to start it."""
    done = run_to_end(warm_server().command(SCRIPT), cwd=tmp_path)
    assert done.code == 1
    assert "asyncddp run -np 4" in done.stderr
