"""Methods on the graphs that they admit: golden biases, no bias, and divergence where refused."""

from __future__ import annotations

import itertools
import threading
import zlib
from functools import cache, partial

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS, CommunicationPattern
from asyncddp.compression.counter_random import normal, random_words
from tests.support import LoopbackWorld, on
from tests.support.least_squares import LeastSquares
from tests.support.loops import on_each_rank
from tests.support.methods import FORMULAS, admits, fitting_graph
from tests.support.oracle import FAMILIES, family

EXACT = [
    name
    for name in ALGORITHMS
    if ALGORITHMS[name].exact and CommunicationPattern.NEIGHBORS in ALGORITHMS[name].how
]
TITLES = [title for title in FORMULAS if title.partition(",")[0] in EXACT]


def solve(name, graph, steps, lr, start=0.0, **options):
    """This rank's solution of LS(n), from zero, by full gradients."""
    hessian, slope = LeastSquares(bf.size()).gradient(bf.rank())
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    x = model.weight
    torch.nn.init.constant_(x, start)
    plain = torch.optim.SGD([x], lr=lr)
    if CommunicationPattern.NEIGHBORS in ALGORITHMS[name].how:
        options["communication"] = "neighbor_allreduce"
    optimizer = bf.DistributedOptimizer(plain, model, name, topology=graph, **options)
    for _ in range(steps):
        x.grad = (hessian @ x.detach()[0] - slope)[None]
        optimizer.step()
    return x.detach()[0].numpy()


def error(solutions):
    return LeastSquares(len(solutions)).error(np.stack(solutions))


@pytest.mark.parametrize(
    ("name", "bias"), [("adapt_then_combine", 5.5332e-2), ("adapt_with_combine", 7.7835e-2)]
)
def test_published_biases(name, bias):
    """LS(8) on the ring with steps of 0.05, to the digits that are written down, by the formula."""
    problem, mixing = LeastSquares(8), topology.mixing_matrix(topology.ring(8))
    models = FORMULAS[name][1](
        np.zeros((8, 10)), lambda k: mixing, problem.gradients, lambda k: 0.05
    )
    found = problem.error(next(itertools.islice(models, 499, None)))
    assert found == pytest.approx(bias, rel=1e-4)


def steps_to_the_optimum(title, graph, n, most):
    """After how many steps the formula is there, so many at most, of which size, and its error."""
    options, formula = FORMULAS[title]
    lr = 0.05 if "diging" in title else 0.1
    problem, schedule = LeastSquares(n), topology.as_schedule(graph)
    mixing = cache(partial(topology.mixing_matrix, schedule))
    period = schedule.period or 10**9
    models = formula(
        np.zeros((n, 10)), lambda k: mixing(k % period), problem.gradients, lambda k: lr
    )
    for k, x in enumerate(models, 1):
        if k == most or (k % 50 == 0 and problem.error(x) <= 5e-12):
            return k, lr, problem.error(x), options
    raise AssertionError


def solved(world, title, graph, most=5000):
    """Whether a method comes to the optimum in as many steps as its formula needs, or the most."""
    name = title.partition(",")[0]
    steps, lr, expected, options = steps_to_the_optimum(title, graph, world.size, most)
    found = error(world.run(solve, name, graph, steps, lr, **options))
    assert found <= max(1e-11, 1.01 * expected), title
    return expected <= 5e-12 or steps == most


@on("loopback-4", "mpi-4")
def test_exact_methods_have_none(world):
    """As fast as the formula: one that tracks gradients, one that corrects models, one on trees."""
    for title in ("gradient_tracking", "exact_diffusion", "relay_sgd"):
        assert solved(world, title, fitting_graph(title.partition(",")[0], 4), most=100)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("graph", "n"),
    [
        *((graph, n) for n in (4, 8) for graph in FAMILIES),
        *((graph, 16) for graph in ("exponential_two", "one_peer_exponential", "base_k", "ring")),
    ],
)
def test_exact_methods_on_every_graph_that_they_admit(graph, n):
    """Whatever ``needs`` lets through is solved, as fast as the formula does."""
    made = family(graph, n)
    for title in TITLES if made is not None else ():
        if admits(title.partition(",")[0], made):
            assert solved(LoopbackWorld(n), title, made)


DIVERGES = [
    ("d2", topology.hypercube(8), "its smallest eigenvalue is -0.5"),
    ("exact_diffusion", topology.shift_one(8), "it changes from round to round"),
    ("edm", topology.shift_one(8), "it changes from round to round"),
    ("extra", topology.shift_one(8), "it changes from round to round"),
    ("decentlam", topology.one_peer_exponential(8), "it changes from round to round"),
    ("decentlam", topology.exponential_two(8), "its weights are not symmetric"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "graph", "words"), DIVERGES, ids=str)
def test_where_a_method_diverges_it_is_refused(name, graph, words):
    """The message has the reason, a graph and a method that work; force=True has it diverge."""

    def refused():
        with pytest.raises(topology.TopologyError, match=words) as caught:
            solve(name, graph, 1, 0.1)
        return str(caught.value)

    (message, *_) = LoopbackWorld(8).run(refused)
    suggestion = message.rpartition("Use ")[2]
    instead, _, alternative = suggestion.partition(" instead, or algorithm=")
    alternative = alternative.removesuffix(" on this one").strip("'")
    assert admits(name, eval(instead, {"topology": topology}))
    assert admits(alternative, graph)
    with np.errstate(all="ignore"):
        found = error(LoopbackWorld(8).run(solve, name, graph, 150, 0.1, force=True))
    assert not found < 1.0


@on_each_rank(ranks=4)
def test_a_cycle_is_no_tree():
    """RelaySGD counts what comes around twice: the cycle is named, and a tree."""
    words = r"edges go round in a cycle, as .* needs a tree.* Use topology\.tree\(4\) instead"
    with pytest.raises(topology.TopologyError, match=words):
        solve("relay_sgd", topology.ring(4), 1, 0.1)
    words = "sends to rank 1, which sends nothing back"
    with pytest.raises(topology.TopologyError, match=words):
        solve("relay_sgd", topology.ring(4, "right"), 1, 0.1)


@pytest.mark.parametrize("compression", ["sign", "top_k", "random_k", "power_sgd", "dct_top_k"])
@on_each_rank(ranks=2)
def test_moniqua_needs_small_errors(compression):
    """A remainder is an element by itself, with an error far below one half: refused by name."""
    with pytest.raises(bf.ArgumentError, match="moniqua needs each element by itself"):
        solve("moniqua", topology.ring(2), 1, 0.1, compression=compression)


def gossip(name, graph, apart, steps, **options):
    """Without gradients, from models that are so far apart in each element."""
    model = torch.nn.Linear(6, 5, bias=False, dtype=torch.float64)
    random = torch.Generator().manual_seed(bf.rank())  # torch's own is that of all ranks' threads
    torch.nn.init.uniform_(model.weight, -apart / 2, apart / 2, generator=random)
    start = model.weight.detach().clone().numpy()
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = bf.DistributedOptimizer(
        plain, model, name, topology=graph, **options, broadcast=False
    )
    for _ in range(steps):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    return start, model.weight.detach().numpy()


@pytest.mark.parametrize("compression", ["minmax_uint8", "qsgd_int4"])
def test_moniqua_keeps_the_mean_of_ranks_that_are_near(compression):
    """Within θ all decode a rank alike, up to B δ; beyond it they do not come together."""
    options = {"theta": 1.0, "compression": compression}
    spreads = []
    for apart in (1.0, 8.0):
        found = LoopbackWorld(4).run(gossip, "moniqua", topology.ring(4), apart, 9, **options)
        start, end = (np.stack(one) for one in zip(*found, strict=True))
        np.testing.assert_allclose(end.mean(0), start.mean(0), rtol=0, atol=1e-13)
        spreads.append(np.ptp(end, 0).max())
    assert spreads[0] < {"minmax_uint8": 0.02, "qsgd_int4": 0.5}[compression]
    assert spreads[1] > 1.0


def power_gossip(models, w, first, steps):
    """Matrices of all ranks, ``[rank, row, column]``, after so many rounds of power iterations."""
    p = dict(first)
    for k in range(steps):
        x = models if k % 2 == 0 else models.transpose(0, 2, 1)
        change = np.zeros_like(x)
        for i, j in p:
            d = (x[j] - x[i]) @ p[i, j]
            change[i] += w[i, j] * np.outer(d, p[i, j])
            change[j] -= w[i, j] * np.outer(d, p[i, j])
            p[i, j] = d / np.linalg.norm(d)
        models = x + change if k % 2 == 0 else (x + change).transpose(0, 2, 1)
    return models


def direction(low, high, size):
    """The first direction of an edge, of which both ends know without a message."""
    seed = zlib.crc32(f"{low} {high} weight".encode())
    drawn = normal(random_words(seed, size, torch.device("cpu"))).numpy()
    return drawn / np.linalg.norm(drawn)


@on("loopback-4", "mpi-4")
def test_power_gossip_by_its_formula(world):
    """Rows and columns by turns; the mean is kept, and ranks of one matrix come together."""
    graph = topology.ring(4)
    found = world.run(gossip, "power_gossip", graph, 1.0, 7)
    start, end = (np.stack(one) for one in zip(*found, strict=True))
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    first = {edge: direction(*edge, 6) for edge in edges}
    expected = power_gossip(start, topology.mixing_matrix(graph), first, 7)
    np.testing.assert_allclose(end, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(end.mean(0), start.mean(0), rtol=0, atol=1e-14)
    _, end = (
        np.stack(one)
        for one in zip(*world.run(gossip, "power_gossip", graph, 1.0, 60), strict=True)
    )
    assert np.ptp(end, 0).max() < 1e-3


@on_each_rank(ranks=4)
def test_power_gossip_takes_no_compressor_and_no_edge_of_one_way():
    """It is one, and a difference has two ends: refused by name, also where a graph is forced."""
    graph = topology.ring(4, "right")
    with pytest.raises(topology.TopologyError, match="its weights are not symmetric"):
        solve("power_gossip", graph, 1, 0.1)
    with pytest.raises(bf.ArgumentError, match=r"edges that go both ways.* rank \d that does"):
        solve("power_gossip", graph, 1, 0.1, force=True)
    with pytest.raises(bf.ArgumentError, match="power_gossip compresses by itself"):
        solve("power_gossip", topology.ring(4), 1, 0.1, compression="bf16")


def small_state():
    """Numbers that a rank keeps, of a net with matrices, a bias and a kernel."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 6))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"num_steps_per_communication": 2, "broadcast": False}  # equal models give no vector
    optimizer = bf.DistributedOptimizer(
        plain, model, "power_gossip", topology=topology.ring(4), **options
    )
    for _ in range(4):
        model(torch.ones(1, 2, 3, 3)).sum().backward()
        optimizer.step()
    (bucket,) = optimizer._averager.buckets
    return [sum(one.numel() for one in kept.values()) for kept in bucket.vectors.values()]


def test_power_gossip_keeps_a_vector_for_each_neighbour_and_matrix():
    """After an even number of rounds as long as rows are: 2 · 3 · 3 of the kernel, and 4."""
    assert LoopbackWorld(4).run(small_state) == [[18 + 4, 18 + 4]] * 4


def test_steps_go_on_while_a_fragment_travels():
    """Ranks wait for it in the step that applies it, or where another method takes over."""
    ahead = threading.Event()

    def case():
        model = torch.nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"communication_interval": 5, "delay": 4, "fragments": 1}
        with pytest.raises(bf.ArgumentError, match="lasts 4 steps more, in which buckets change"):
            bf.DistributedOptimizer(
                plain, model, "streaming_diloco", update_in_backward=True, **options
            )
        optimizer = bf.DistributedOptimizer(plain, model, "streaming_diloco", **options)
        if bf.rank() == 0:
            assert ahead.wait(60)
        rounds = []
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            rounds.append(optimizer.round)
        ahead.set()
        optimizer.step()
        optimizer.step()
        assert optimizer.round == 1
        optimizer.switch_to("local_sgd")
        return rounds

    assert LoopbackWorld(2).run(case) == [[0] * 8] * 2


@on_each_rank(ranks=4)
def test_sparse_loco_needs_all_ranks():
    """Its outer parameters are everybody's: the error names the complete graph."""
    words = r"not every rank averages all with equal weights.* Use topology\.complete\(4\)"
    with pytest.raises(topology.TopologyError, match=words):
        solve("sparse_loco", topology.ring(4), 1, 0.1)


@pytest.mark.nightly
@pytest.mark.parametrize(("decay", "least", "most"), [(1.0, 0.0, 0.05), (0.0, 0.5, 1.0)])
def test_sparse_loco_holds_one_model_bit_for_bit(decay, least, most):
    """All ranks sum the same messages in one order; what top_k leaves out is repaid, or lost."""
    options = {"communication_interval": 2, "error_decay": decay, "compression": "top_k"}
    found = LoopbackWorld(5).run(solve, "sparse_loco", None, 376, 0.016, **options)
    assert all(np.array_equal(one, found[0]) for one in found)
    assert least <= error(found) <= most


@pytest.mark.parametrize("branching", [2])
def test_relays_on_trees(branching):
    """A binary tree: uniform averages, whatever the weights."""
    graph = topology.tree(4, branching)
    assert error(LoopbackWorld(4).run(solve, "relay_sgd", graph, 400, 0.15)) <= 1e-11


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if ALGORITHMS[n].owns_momentum])
def test_momentum_is_kept_once(name):
    """The optimizer must have none, and one rank trains with the method's as several do."""

    def refused():
        model = torch.nn.Linear(1, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        words = rf"{name} keeps the momentum itself.* got momentum=0.9; .* beta=0.9"
        with pytest.raises(bf.ArgumentError, match=words):
            bf.DistributedOptimizer(plain, model, name)

    LoopbackWorld(2).run(refused)
    alone = LoopbackWorld(1).run(solve, name, None, 5, 0.1, beta=0.9)[0]
    plain = LoopbackWorld(1).run(solve, "adapt_then_combine", None, 5, 0.1)[0]
    assert np.abs(alone - plain).max() > 1e-3


def uneven(name, epochs, graph, **options):
    """Epochs in ``join``, of as many steps as each rank has; then the same number for all."""
    hessian, slope = LeastSquares(bf.size()).gradient(bf.rank())
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    x = model.weight
    torch.nn.init.constant_(x, 0.0)
    plain = torch.optim.SGD([x], lr=0.1)
    optimizer = bf.DistributedOptimizer(plain, model, name, topology=graph, **options)

    def step():
        x.grad = (hessian @ x.detach()[0] - slope)[None]
        optimizer.step()

    for steps in epochs:
        with bf.join(optimizer):
            for _ in range(steps[bf.rank()]):
                step()
    for _ in range(400):
        step()
    return x.detach()[0].numpy()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "title", [one for one in TITLES if one not in ("beer", "relay_sgd", "push_diging")]
)
def test_exact_after_unequal_numbers_of_batches(title):
    """Who is done takes its part of what is tracked along: methods begin anew, and are exact."""
    name, (options, _) = title.partition(",")[0], FORMULAS[title]
    graph = fitting_graph(name, 4)
    epochs = [(3, 5, 9, 20), (20, 2, 0, 7)]
    found = LoopbackWorld(4).run(uneven, name, epochs, graph, **options)
    assert error(found) <= 1e-11


@on_each_rank(ranks=2)
def test_closures_that_evaluate_again_are_refused():
    """A gradient is replaced once a step: LBFGS would see the plain one after that."""
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.LBFGS(model.parameters(), max_iter=4)
    optimizer = bf.DistributedOptimizer(plain, model, "gradient_tracking")

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) - 1 - bf.rank()).square().sum()
        loss.backward()
        return loss

    words = "gradient_tracking replaces gradients once a step.* LBFGS"
    with pytest.raises(bf.UsageError, match=words):
        optimizer.step(closure)
