"""Comparisons: the same start and batches for all methods, refusals by name, and pictures."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from asyncddp import simulate, topology
from asyncddp.errors import ArgumentError, EnvironmentProblem


def sgd(parameters):
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def compare(*methods, **settings):
    """Compare on LS(4)."""
    arguments = {"steps": 6, "topology": topology.ring(4), **settings}
    return simulate.compare(simulate.least_squares(4), methods, sgd, **arguments)


def test_each_run_is_that_of_train():
    """Nothing of one method reaches the next."""
    found = compare("adapt_then_combine", ("choco_sgd", {"compression": "sign"}))
    for run, (name, own) in zip(
        found.runs,
        [("adapt_then_combine", {}), ("choco_sgd", {"compression": "sign"})],
        strict=True,
    ):
        alone = simulate.train(
            simulate.least_squares(4), sgd, name, steps=6, topology=topology.ring(4), **own
        )
        assert run.method == alone.method
        torch.testing.assert_close(run.parameters, alone.parameters, rtol=0, atol=0)
    assert found.runs[1].method == "choco_sgd, compression='sign'"


def test_methods_that_cannot_are_left_out_with_the_reason():
    """The others run."""
    found = compare("choco_sgd", "adapt_then_combine", "qadam", topology=topology.base_k(4, 1))
    assert [run.method for run in found.runs] == ["adapt_then_combine"]
    assert "choco_sgd cannot run on base_k(4, 1)" in found.refused["choco_sgd"]
    assert "QAdamOptimizer" in found.refused["qadam"]


def test_an_error_where_none_can():
    """It has all reasons."""
    with pytest.raises(
        ArgumentError, match=r"none of the methods.*choco_sgd cannot.*QAdamOptimizer"
    ):
        compare("choco_sgd", "qadam", topology=topology.base_k(4, 1))


def test_progress_tells_the_method_and_the_step():
    """Once after each step."""
    told = []
    compare("adapt_then_combine", "push_sum", steps=2, progress=lambda *one: told.append(one))
    assert told == [(name, step) for name in ("adapt_then_combine", "push_sum") for step in (1, 2)]


def test_pictures_show_each_measure_over_each_cost():
    """A row for what was measured, columns for steps, bytes and seconds, a line for each run."""
    pytest.importorskip("matplotlib")
    runs = compare("adapt_then_combine", "adapt_with_combine").runs
    figure = simulate.draw(runs, "LS(4)")
    axes = np.array(figure.axes).reshape(3, 3)
    assert [one.get_ylabel() for one in axes[:, 0]] == [
        "training loss", "distance from the optimum", "consensus distance",
    ]  # fmt: skip
    for place, cost in enumerate((runs[0].steps, runs[0].bytes_sent / 1e6, runs[0].seconds)):
        line = axes[1, place].lines[0]
        np.testing.assert_allclose(line.get_xdata(), cost)
        np.testing.assert_allclose(line.get_ydata(), runs[0].error)
    assert [line.get_label() for line in axes[0, 0].lines] == [run.method for run in runs]


def test_pictures_without_matplotlib_name_the_package(monkeypatch):
    """The error has the install command."""
    runs = compare("adapt_then_combine").runs
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EnvironmentProblem, match=r"simulate\.draw needs matplotlib.*pip install"):
        simulate.draw(runs)


def test_optimizers_by_name():
    """With their options; others are named."""
    parameter = torch.nn.Parameter(torch.ones(1))
    made = simulate.optimizer_named("AdamW", lr=0.3, betas=(0.5, 0.6))([parameter])
    assert type(made) is torch.optim.AdamW
    assert made.param_groups[0]["betas"] == (0.5, 0.6)
    for name in ("Adm", "Optimizer", "lr_scheduler"):
        with pytest.raises(ArgumentError, match=rf"torch\.optim has no '{name}'; it has ASGD"):
            simulate.optimizer_named(name)
    with pytest.raises(ArgumentError, match=r"argument momentum: torch\.optim\.Adam has no such"):
        simulate.optimizer_named("Adam", momentum=0.9)
