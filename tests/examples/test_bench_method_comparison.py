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
    squares, logistic, quadratics, *digits = (
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
    assert "All 5 aims are met." in done.stdout
    for problem in ("least-squares", "logistic", "quadratics", "digits"):
        assert (tmp_path / f"out-{problem}.png").read_bytes().startswith(PNG)


def test_every_method_that_waits_is_compared():
    """Methods of the registry are there by themselves; asynchronous ones have no rounds."""
    from benchmarks.methods.contender import every_method

    from asyncddp.algorithms import ALGORITHMS

    left_out = {"a2cid2", "ad_psgd", "async_model_average", "overlap_sgp", "pull_get", "win_put"}
    assert {one.name for one in every_method()} == set(ALGORITHMS) - left_out


def test_newton_finds_the_optimum_of_the_logistic_regression():
    """The gradient of the mean loss is rounding there."""
    from benchmarks.methods.logistic import logistic_regression

    problem = logistic_regression(4, seed=1)
    rows = np.concatenate([one[0].numpy() for one in problem.data])
    labels = np.concatenate([one[1].numpy() for one in problem.data])
    chances = 1 / (1 + np.exp(-rows @ problem.optimum.numpy()))
    assert np.abs(rows.T @ (chances - labels) / len(rows)).max() < 1e-14


@pytest.mark.parametrize("heterogeneity", [0.0, 0.1, 10.0])
def test_random_quadratics_are_as_heterogeneous_as_is_said(heterogeneity):
    """At the optimum, of norm 1, gradients sum to zero and their mean square is ζ²."""
    from benchmarks.methods.relayed_sums import random_quadratics

    problem = random_quadratics(6, heterogeneity, seed=2)
    optimum = problem.optimum.numpy()
    slopes = np.stack([a.numpy().T @ (a.numpy() @ optimum - b.numpy()) for a, b in problem.data])
    assert np.linalg.norm(optimum) == pytest.approx(1)
    assert np.abs(slopes.sum(axis=0)).max() < 1e-12
    assert np.square(slopes).sum(axis=1).mean() == pytest.approx(heterogeneity, rel=1e-9, abs=1e-20)


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


def test_the_distance_that_ranks_keep_is_that_of_simulated_noise():
    """Ranks that move at random and average, for many rounds; an average over all leaves none."""
    from benchmarks.methods.digits import kept_distance

    from asyncddp import topology

    assert kept_distance(topology.complete(6)) == pytest.approx(0, abs=1e-12)
    schedule, random = topology.base_k(5, 1), np.random.default_rng(0)
    x, found = np.zeros((5, 20_000)), []
    for number in range(20 * schedule.period):
        x = topology.mixing_matrix(schedule, number) @ (x + random.standard_normal(x.shape))
        found.append(np.square(x - x.mean(axis=0)).mean())
    assert np.mean(found[-schedule.period :]) == pytest.approx(kept_distance(schedule), rel=0.02)
