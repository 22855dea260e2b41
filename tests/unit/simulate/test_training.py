"""Simulated training: known answers, many ranks, what is recorded, and mistakes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncddp import simulate, topology
from asyncddp.algorithms.methods.adapt_then_combine import AdaptThenCombine
from asyncddp.errors import ArgumentError, UnknownNameError
from asyncddp.simulate.problem import StackedBatches
from asyncddp.topology import TopologyError


def sgd(lr):
    """Gradient descent by this step size."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def train(algorithm="adapt_then_combine", ranks=4, optimizer=None, steps=2, **settings):
    """Train LS(n)."""
    return simulate.train(
        simulate.least_squares(ranks), optimizer or sgd(0.1), algorithm, steps=steps, **settings
    )


@pytest.mark.parametrize(
    ("algorithm", "bias"),
    [("adapt_then_combine", 5.5332e-2), ("adapt_with_combine", 7.7835e-2)],
)
def test_known_biases_on_the_ring(algorithm, bias):
    """LS(8) with γ = 0.05: the distance to the optimum that theory has, after it has settled."""
    run = train(algorithm, 8, sgd(0.05), topology=topology.ring(8), steps=400, record_every=400)
    assert run.error[-1] == pytest.approx(bias, rel=2e-4)


def test_an_average_of_gradients_is_exact():
    """All ranks reach the optimum."""
    assert train("gradient_allreduce", 8, steps=400, record_every=400).error[-1] < 1e-11


def test_a_thousand_ranks():
    """LS(1000): all ranks have mixed after log2(n) steps, and the error falls."""
    graph = topology.one_peer_exponential(1000)
    run = train(ranks=1000, topology=graph, steps=30, record_every=10)
    assert run.parameters["weight"].shape == (1000, 1, 10)
    assert run.error[-1] < 0.6 * run.error[0]
    assert run.steps.tolist() == [0, 10, 20, 30]


def test_what_is_recorded():
    """Losses are means since the last record; bytes and seconds grow; the first is the start."""
    problem = simulate.least_squares(3)
    found = []
    run = simulate.train(
        problem,
        sgd(0.1),
        topology=topology.ring(3),
        steps=5,
        record_every=2,
        progress=found.append,
    )
    assert run.steps.tolist() == [0, 2, 4, 5]
    assert found == [1, 2, 3, 4, 5]
    assert np.isnan(run.loss[0])
    assert run.bytes_sent.tolist() == [0, 512, 1024, 1280]  # 2 neighbours, 16 float64 a step
    assert run.error[0] == pytest.approx(1.0)
    assert run.consensus_distance[0] == 0.0 < run.consensus_distance[-1]
    each = simulate.train(problem, sgd(0.1), topology=topology.ring(3), steps=5)
    assert run.loss[1:] == pytest.approx(
        [each.loss[1:3].mean(), each.loss[3:5].mean(), each.loss[5]]
    )
    rows = run.parameters["weight"][:, 0]
    spread = (rows - rows.mean(dim=0)).square().sum(dim=1).mean().sqrt()
    assert run.consensus_distance[-1] == pytest.approx(float(spread))


def test_tables_are_tidy():
    """A row for each record and measure, and no row for what was not measured."""
    runs = [train(name) for name in ("adapt_then_combine", "gradient_allreduce")]
    table = simulate.table(runs)
    assert {len(column) for column in table.values()} == {2 * (2 + 3 + 3)}  # loss, error, distance
    assert set(table["measure"]) == {"loss", "error", "consensus_distance"}
    chosen = (table["method"] == "gradient_allreduce") & (table["measure"] == "error")
    assert table["value"][chosen].tolist() == runs[1].error.tolist()
    assert table["step"][chosen].tolist() == [0, 1, 2]


def test_the_average_model_is_judged():
    """``evaluate`` gets a module with the mean parameters, in evaluation mode."""
    seen = []

    def evaluate(model):
        seen.append((model.weight.detach().clone(), model.training))
        return float(model.weight.sum())

    base = simulate.least_squares(3)
    problem = simulate.Problem(base.model, base.loss, base.data, evaluate=evaluate)
    run = simulate.train(problem, sgd(0.1), topology=topology.ring(3), steps=2)
    torch.testing.assert_close(seen[-1][0], run.parameters["weight"].mean(dim=0))
    assert [training for _, training in seen] == [False] * 3
    assert run.score.tolist() == [float(weight.sum()) for weight, _ in seen]


def test_the_model_given_stays_as_it_is():
    """A simulation trains copies."""
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    data = [(torch.ones(1, 2), torch.ones(1, 1))] * 2
    simulate.train(simulate.Problem(model, F.mse_loss, data), sgd(0.1), steps=2)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_batches_are_epochs_without_repetition():
    """Each sample once an epoch, in an order of its own for each rank, epoch and seed."""
    inputs = [torch.arange(float(n)) + 100 * n for n in (6, 9)]
    problem = simulate.Problem(torch.nn.Linear(1, 1), F.mse_loss, [(x,) for x in inputs], 3)
    batches = StackedBatches(problem, seed=0)
    rows = [batches.of([0, 1], [k, k])[0] for k in range(6)]
    first = [torch.cat([row[0] for row in rows[k : k + 2]]) for k in (0, 2, 4)]
    second = torch.cat([row[1] for row in rows[:3]])
    for epoch in first:
        assert sorted(epoch.tolist()) == inputs[0].tolist()
    assert sorted(second.tolist()) == inputs[1].tolist()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(batches.of([1], [4])[0][0], rows[4][1])  # the same whenever asked for
    assert not torch.equal(torch.stack(rows), torch.stack([
        StackedBatches(problem, seed=1).of([0, 1], [k, k])[0] for k in range(6)
    ]))  # fmt: skip


def test_batches_larger_than_the_data_of_a_rank():
    """They go on with the next epoch."""
    problem = simulate.Problem(torch.nn.Linear(1, 1), F.mse_loss, [(torch.arange(3.0),)], 7)
    (batch,) = StackedBatches(problem, 0).of([0], [0])
    assert sorted(batch[0].tolist())[0:7:3] == [0.0, 1.0, 2.0]


def test_a_method_of_ones_own():
    """Any subclass of Algorithm whose hooks treat each element by itself."""

    class Damped(AdaptThenCombine):
        """Move halfway to the neighbours' average."""

        name = "damped"

        def incoming(self, bucket, received):
            bucket.flat.lerp_(received.mixed, 0.5)

    run = train(Damped, topology=topology.ring(4))
    half = topology.ring(4)
    for i, j, edge in half.edges(data=True):
        edge["weight"] = 0.5 * edge["weight"] + 0.5 * (i == j)
    torch.testing.assert_close(run.parameters, train(topology=half).parameters)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: train("adapt_than_combine"),
            UnknownNameError,
            "Did you mean 'adapt_then_combine'",
        ),
        (lambda: train(topology=topology.ring(5)), TopologyError, "ring.5. has 5 nodes.*n=4"),
        (
            lambda: train("choco_sgd", topology=topology.base_k(4, 1)),
            TopologyError,
            "choco_sgd cannot run",
        ),
        (lambda: train(topology_=1), ArgumentError, "topology_: adapt_then_combine has no such"),
        (lambda: train(steps=-1), ArgumentError, "argument steps: expected a whole number"),
        (lambda: train(record_every=0), ArgumentError, "argument record_every"),
        (lambda: train("async_model_average", sync_interval_ms=5.0), ArgumentError, "by the clock"),
        (lambda: train(autotune=True), ArgumentError, "argument autotune: .*leave it out"),
        (lambda: train(update_in_backward=True), ArgumentError, "argument update_in_backward"),
        (lambda: train("win_put", max_staleness=3), ArgumentError, "argument max_staleness"),
        (lambda: train(communication="win_put"), ArgumentError, "works with allreduce"),
        (lambda: train(optimizer=torch.optim.LBFGS), ArgumentError, "LBFGS evaluates the model"),
        (lambda: train("qadam"), ArgumentError, "expected asyncddp.QAdamOptimizer, got SGD"),
        (lambda: train(compression="sign"), ArgumentError, "choco_sgd"),
    ],
)
def test_mistakes_are_named_with_the_remedy(call, kind, message):
    """Unknown methods, graphs of another size, and what only real ranks have."""
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        ([], None, "expected the tensors of at least one rank"),
        ([(torch.ones(3, 1), torch.ones(2, 1))], None, r"rank 0 has tensors of lengths \[3, 2\]"),
        ([(torch.ones(0, 1), torch.ones(0, 1))], 2, r"lengths \[0, 0\]"),
        ([(torch.ones(2, 1),), (torch.ones(2, 1), torch.ones(2))], 2, "rank 1 has 2 tensors"),
        ([(torch.ones(2, 1),), (torch.ones(5, 1),)], None, "from 2 to 5 samples.*equal_sizes=True"),
        ([(torch.ones(2, 1),)], 0, "argument batch_size: expected None or at least 1, got 0"),
    ],
)
def test_data_that_do_not_fit(data, batch_size, message):
    """The rank, the sizes, and what to give."""
    with pytest.raises(ArgumentError, match=message):
        simulate.Problem(torch.nn.Linear(1, 1), F.mse_loss, data, batch_size)


def test_models_for_other_ranks():
    """A list has one for each."""
    with pytest.raises(ArgumentError, match="one for each of the 2 ranks in data, got 3"):
        simulate.Problem([torch.nn.Linear(1, 1)] * 3, F.mse_loss, [(torch.ones(1, 1),)] * 2)


def test_a_model_without_parameters():
    """There is nothing to train."""
    problem = simulate.Problem(torch.nn.ReLU(), F.mse_loss, [(torch.ones(1), torch.ones(1))])
    with pytest.raises(ArgumentError, match="no parameter of it requires gradients"):
        simulate.train(problem, sgd(0.1), steps=1)


def test_weights_tied_by_storage_are_refused():
    """Stacked models would end the tie, as buckets do on ranks."""
    problem = simulate.least_squares(2)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(ArgumentError, match=r"0.weight and 1.weight share memory|1.weight and 0"):
        simulate.train(replace(problem, model=model), sgd(0.1), "adapt_then_combine", steps=1)
