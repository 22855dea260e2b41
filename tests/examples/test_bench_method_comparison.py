"""scripts/bench methods: errors on known problems, published steps, accuracies, and pictures."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.support.processes import REPO, run_to_end, warm_python

SCRIPTS = str(REPO / "scripts")
PATH = os.pathsep.join((SCRIPTS, str(REPO)))
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.nightly
@pytest.mark.slow
def test_quick_run_prints_tables_and_writes_json_and_a_picture_for_each_problem(tmp_path):
    """The biases on the ring are the published ones; what is exact is, where it is admitted."""
    command = [warm_python(), "-m", "benchmarks", "methods", "--quick"]
    command += ["--json", "out.json", "--plot", "out.png"]
    environ = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    done = run_to_end(command, cwd=tmp_path, timeout=300, environ=environ)
    assert done.code == 0, done
    found = json.loads((tmp_path / "out.json").read_text())
    squares, logistic, quadratics, *digits, errors, distances = (
        {line["cells"][0]: line["cells"][1:] for line in sheet["lines"]}
        for sheet in found["sheets"]
    )
    assert squares["adapt_then_combine"][0] == "5.5332e-02"
    assert squares["adapt_with_combine"][0] == "7.7835e-02"
    assert max(map(float, squares["gradient_tracking"])) <= 1e-11
    assert squares["d2"][0] == "-"
    assert float(squares["d2"][1]) <= 1e-11
    assert max(map(float, logistic["gradient_tracking"])) <= 1e-11
    assert min(map(float, logistic["adapt_then_combine"])) > 1e-2
    assert all(0 < int(cell) < 100 for cell in quadratics["RelaySGD, chain"][:3])
    assert all(10 < float(row[0]) < 100 for sheet in digits for row in sheet.values())
    _, drawn_anew, old_graph = map(float, distances["adapt_then_combine"])
    assert 0 < drawn_anew < old_graph
    assert all(0 < float(cell) < 1.5 for row in errors.values() for cell in row)
    assert "All 5 aims are met." in done.stdout
    for problem in ("least-squares", "logistic", "quadratics", "digits", "churn"):
        assert (tmp_path / f"out-{problem}.png").read_bytes().startswith(PNG)


def test_every_method_that_waits_is_compared():
    """Methods of the registry are there by themselves; asynchronous ones have no rounds."""
    from benchmarks.methods.contender import every_method

    from asyncddp.algorithms import ALGORITHMS

    left_out = {"a2cid2", "ad_psgd", "async_model_average", "overlap_sgp", "pull_get", "win_put"}
    left_out.add("decoupled_diloco")
    assert {one.name for one in every_method()} == set(ALGORITHMS) - left_out


def test_paired_differences_are_judged_by_their_standard_error():
    """By hand; what lies within two errors says nothing, in whichever direction."""
    from benchmarks.methods.tuned_digits import PairedDifference

    found = PairedDifference.of((3.0, 5.0, 4.0), (2.0, 2.0, 2.0))  # 1, 3, 2
    assert found.mean == pytest.approx(2.0)
    assert found.error == pytest.approx(1 / np.sqrt(3))
    assert found.positive is True
    assert PairedDifference.of((2.0, 2.0, 2.0), (3.0, 5.0, 4.0)).positive is False
    assert PairedDifference.of((1.0, 3.0), (2.0, 1.0)).positive is None
    assert found.told(10) == "+20.0 ± 5.8"
