"""examples/benchmark.py: bytes of each method, and a model of the user's own."""

from __future__ import annotations

import sys

import pytest

from tests.examples.test_digits import number, table_of
from tests.support.processes import REPO, run_to_end, warm_script

SCRIPT = str(REPO / "examples" / "benchmark.py")
MINE = """
import torch

def build():
    model = torch.nn.Linear(1000, 10, bias=False)
    return model, lambda: (torch.randn(4, 1000),), lambda model, batch: model(batch[0]).mean()
"""


@pytest.mark.mpi(2)
def test_a_model_of_ones_own_and_the_bytes_of_each_method(tmp_path):
    """40 kB of parameters: as much by ddp and by one neighbour of two ranks, nothing alone."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    methods = ("local", "ddp", "gradient_allreduce", "adapt_then_combine", "choco_sgd:sign")
    options = ("--smoke", "--model", "mine.py:build", "--methods", *methods, "--out", "b.svg")
    start = (sys.executable, "-m", "asyncddp", "run", "-np", "2")
    done = run_to_end([*start, *warm_script(SCRIPT, *options, frameworks=True)], cwd=tmp_path)
    assert done.code == 0, done
    assert "0.04 MB of parameters, 2 ranks" in done.stdout
    table = table_of(done)
    sent = {name: float(cells[-1]) for name, cells in table.items() if name}
    assert sent.pop("local") == 0
    assert 0 < sent.pop("choco_sgd:sign") < 0.003
    assert sent == pytest.approx(dict.fromkeys(methods[1:4], 0.040), abs=2e-3)
    for cells in (table[name] for name in methods):
        median, least, most = map(number, cells[:3])
        assert least <= median <= most
    assert (tmp_path / "b.svg").read_text(encoding="utf-8").startswith("<?xml")
