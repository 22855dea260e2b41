"""Every method of the registry does what it declares."""

from __future__ import annotations

import importlib
import inspect
import itertools

import networkx as nx
import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import (
    ALGORITHMS,
    Algorithm,
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
    TopologyRequirements,
)
from asyncddp.algorithms.phases import PHASES
from asyncddp.algorithms.rounds import COMMUNICATIONS
from tests.support import LoopbackWorld
from tests.support.least_squares import LeastSquares
from tests.support.loops import each, on_each_rank
from tests.support.methods import EACH_STEP, FORMULAS, fitting_graph, one_peer

STEP_SIZE = 0.3
BIASES = {
    "a2cid2": 2.62935e-1,
    "ad_psgd": 2.78588e-1,
    "adapt_then_combine": 1.26520e-1,
    "adapt_with_combine": 2.87860e-1,
    "async_model_average": 2.87860e-1,
    "choco_sgd": 1.26520e-1,
    "decentlam": 1.26520e-1,
    "deepsqueeze": 1.26520e-1,
    "decentralized": 2.87860e-1,
    "low_precision_decentralized": 2.87860e-1,
    "moniqua": 1.26520e-1,
    "overlap_sgp": 1.26520e-1,
    "power_gossip": 1.26520e-1,
    "pull_get": 2.87860e-1,
    "push_sum": 1.26520e-1,
    "quasi_global_momentum": 1.26520e-1,
    "win_put": 2.87860e-1,
}
"""Distance from the optimum on the ring of 4: of the fixed points, solved without this library.

Momentum leaves the fixed points where they are. Where ranks meet in each round, asynchronous
methods are one of the two synchronous ones; so are those that send differences, whose compression
errors vanish, and nearly those that send models.
"""
NEAR_THE_BIAS = {"deepsqueeze": 1e-2, "moniqua": 2e-2}
"""Relative distance to it that compression errors, which do not vanish, leave."""
NEARLY_EXACT = {"bytegrad": 5e-3, "demo": 0.5, "qadam": 1e-2}
"""Largest distance that compression of replicated tensors, or steps along signs, leave."""

MIXING = [name for name in ALGORITHMS if ALGORITHMS[name].what is AveragedQuantity.PARAMETER]
DIFFERENCES = [n for n in MIXING if ALGORITHMS[n].compression is CompressionUse.DIFFERENCES]
PLAIN = [name for name in MIXING if name not in DIFFERENCES]
RARE = [name for name in MIXING if not ALGORITHMS[name].averages_first_step]
EVERY_STEP = [name for name in PLAIN if name not in RARE]
TIME_VARYING = [name for name in EVERY_STEP if not ALGORITHMS[name].needs.static_only]
WITH_MOMENTUM = ["a2cid2"]
"""Methods whose averages have momentum, so that they agree in the long run alone."""
ONE_SIDED = [name for name in MIXING if all(how.one_sided for how in ALGORITHMS[name].how)]
STRONGLY_CONNECTED = [
    TopologyRequirements(strongly_connected=True, column_stochastic=columns)
    for columns in (False, True)
]
every_method = pytest.mark.parametrize("name", list(ALGORITHMS))


def plain_optimizer(name, parameters, lr):
    """Gradient descent; Adam for the method that needs its momentum."""
    if name == "qadam":
        return bf.QAdamOptimizer(parameters, lr=lr / 10, warmup_steps=15)
    return torch.optim.SGD(parameters, lr=lr)


def distributed(plain, model, name, **options):
    """The wrapper; one-sided methods meet in each round, so that their laws are those of W."""
    if name in list(ALGORITHMS) and CommunicationPattern.NEIGHBORS in ALGORITHMS[name].how:
        options.setdefault("communication", "neighbor_allreduce")
    optimizer = bf.DistributedOptimizer(plain, model, name, **options, broadcast=False)
    optimizer.force_barrier = name in ONE_SIDED
    return optimizer


def fit(name, graph, steps, start=0.0, lr=STEP_SIZE, **options):
    """Full-gradient descent on this rank's share of LS(n)."""
    problem = LeastSquares(bf.size())
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, start * bf.rank())
    optimizer = plain_optimizer(name, model.parameters(), lr)
    optimizer = distributed(optimizer, model, name, topology=graph, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        problem.loss(bf.rank(), model.weight[0]).backward()
        optimizer.step()
    return model.weight.detach()[0]


def distance(solutions, n):
    """‖X − 1 x*ᵀ‖_F / (√n ‖x*‖)."""
    return LeastSquares(n).error(torch.stack(solutions).numpy())


@every_method
def test_the_declaration_is_complete(name):
    """A method is data: its name, what, when, among whom, needs, exactness, and its source."""
    method = ALGORITHMS[name]
    assert issubclass(method, Algorithm)
    assert method.name == name
    assert method.when in PHASES
    assert isinstance(method.what, AveragedQuantity)
    assert isinstance(method.when, CommunicationTiming)
    assert method.how
    assert all(isinstance(how, CommunicationPattern) for how in method.how)
    assert isinstance(method.needs, TopologyRequirements)
    assert isinstance(method.exact, bool)
    for part in (".. math::", "References:"):
        assert part in (method.__doc__ or ""), f"{name}'s docstring has no {part}"


@every_method
def test_one_method_one_file(name):
    """A method's file is named as in the literature, and imports no other method."""
    module = importlib.import_module(ALGORITHMS[name].__module__)
    if not module.__name__.startswith("asyncddp."):
        return  # another distribution's
    assert module.__name__ == f"asyncddp.algorithms.methods.{name}"
    source = inspect.getsource(module)
    assert not [other for other in ALGORITHMS if f"import {other}" in source]


def test_the_problem_is_the_known_one():
    """‖x*‖ of LS(4) as written down beside the golden values."""
    assert float(torch.from_numpy(LeastSquares(4).optimum).norm()) == pytest.approx(
        3.1196547892, abs=1e-9
    )


@pytest.mark.parametrize("name", [name for name in RARE if name not in ONE_SIDED])
def test_rare_averages_leave_the_bias_of_their_formula(name):
    """On LS(4), where models drift apart for three steps; a single step would leave none."""
    options, formula = FORMULAS[name]
    problem, schedule = LeastSquares(4), topology.random_matching(4)
    models = formula(
        np.zeros((4, 10)),
        lambda k: topology.mixing_matrix(schedule, k),
        problem.gradients,
        lambda k: STEP_SIZE,
    )
    expected = problem.error(next(itertools.islice(models, 59, None)))
    bias = distance(LoopbackWorld(4).run(fit, name, None, 60, **options), 4)
    assert bias == pytest.approx(expected, rel=1e-9)
    assert bias > 1e-2
    assert not ALGORITHMS[name].exact


def by_formula(name, graph, steps, lr):
    """The models of all ranks in the end: of the formula, which ranks follow step by step."""
    _, formula = FORMULAS[name]
    problem, schedule = LeastSquares(4), ALGORITHMS[name]().schedule_along(graph)
    models = formula(
        np.zeros((4, 10)),
        lambda k: topology.mixing_matrix(schedule, k),
        problem.gradients,
        lambda k: lr,
    )
    return problem.error(next(itertools.islice(models, steps - 1, None)))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in RARE])
def test_exactness_is_as_declared(name):
    """On LS(4) over the ring an exact method reaches the optimum; another keeps its known bias.

    Of methods that ``test_methods_by_formula.py`` holds to a formula the formula does.
    """
    method, lr = ALGORITHMS[name](), STEP_SIZE
    steps = 150 if method.replicates_model else 40  # biases are seen long before 1e-11
    if method.exact and not method.replicates_model:
        steps = 250
    options = {}
    if method.owns_momentum:
        options, lr = {"beta": 0.5}, 0.1 if method.exact else STEP_SIZE
    graph = fitting_graph(name, 4)
    if name in FORMULAS and (method.exact or not FORMULAS[name][0]):
        bias = by_formula(name, graph, steps, 0.1 if method.owns_momentum else STEP_SIZE)
    else:
        bias = distance(LoopbackWorld(4).run(fit, name, graph, steps, lr=lr, **options), 4)
    if ALGORITHMS[name].exact:
        assert bias <= 1e-11
    elif name in NEARLY_EXACT:
        assert 1e-9 < bias <= NEARLY_EXACT[name]
    else:
        assert bias == pytest.approx(BIASES[name], rel=NEAR_THE_BIAS.get(name, 2e-3))


@pytest.mark.parametrize(
    ("name", "communication"),
    [
        (name, communication)
        for name in TIME_VARYING
        for communication in COMMUNICATIONS
        if COMMUNICATIONS[communication].how
        in {*ALGORITHMS[name].how} - {CommunicationPattern.MACHINES}
    ],
)
def test_the_mean_is_kept(name, communication):
    """With no gradient, averaging moves no mean: W is doubly stochastic."""
    graph = one_peer(name, 4)
    solutions = LoopbackWorld(4).run(
        fit, name, graph, 2, start=1.0, lr=0.0, communication=communication
    )
    mean = torch.stack(solutions).mean(dim=0)
    torch.testing.assert_close(mean, torch.full((10,), 1.5, dtype=torch.float64))
    if name not in WITH_MOMENTUM:
        assert torch.equal(solutions[0], solutions[3])


@pytest.mark.parametrize("name", [name for name in EVERY_STEP if name not in TIME_VARYING])
def test_the_mean_is_kept_on_one_graph(name):
    """The same for methods that want one graph for all rounds."""
    graph = fitting_graph(name, 4)
    solutions = LoopbackWorld(4).run(fit, name, graph, 5, start=1.0, lr=0.0)
    mean = torch.stack(solutions).mean(dim=0)
    torch.testing.assert_close(mean, torch.full((10,), 1.5, dtype=torch.float64))


@pytest.mark.parametrize("name", [n for n in ONE_SIDED if ALGORITHMS[n]().max_staleness is None])
def test_who_is_never_waited_for_is_asynchronous(name):
    """Without barriers a rank makes all its steps while its neighbours have not begun."""

    def case():
        model = torch.nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"topology": topology.ring(4), **EACH_STEP.get(name, {})}
        optimizer = bf.DistributedOptimizer(plain, model, name, **options)
        if bf.rank() != 1:
            bf.barrier()
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        if bf.rank() == 1:
            bf.barrier()
        return optimizer.round

    assert LoopbackWorld(4).run(case) == [5] * 4


@pytest.mark.parametrize("name", [name for name in TIME_VARYING if name not in WITH_MOMENTUM])
def test_a_schedule_advances_by_one_round_per_averaging(name):
    """One peer a round: exact consensus after log2(n) rounds, and not before."""
    for steps, spread in ((2, True), (3, False)):
        graph = one_peer(name, 8)
        solutions = LoopbackWorld(8).run(fit, name, graph, steps, start=1.0, lr=0.0)
        assert (torch.stack(solutions).std(dim=0) > 0.1).all() == spread
    torch.testing.assert_close(solutions[0], torch.full((10,), 3.5, dtype=torch.float64))


@every_method
@each("communication", list(COMMUNICATIONS))
def test_communication_is_allowed_as_declared(name, communication):
    """Every kind runs where the method's ``how`` has it, and is refused by name elsewhere."""
    how = COMMUNICATIONS[communication].how
    allowed = how is None or how in ALGORITHMS[name].how

    def case():
        bf.set_machine_topology(topology.ring(2))
        if allowed:
            return fit(name, None, 2, communication=communication)
        words = rf"argument communication: {name} works with .*, got '{communication}'"
        with pytest.raises(bf.ArgumentError, match=words):
            fit(name, None, 2, communication=communication)
        return None

    results = LoopbackWorld(4).run(case, settings={"ranks_per_machine": 2})
    assert all((result is not None) == allowed for result in results)


@every_method
def test_the_default_communication_is_the_first_allowed(name):
    """``communication=None`` never needs a second thought."""

    def case():
        model = torch.nn.Linear(1, 1)
        plain = plain_optimizer(name, model.parameters(), 0.1)
        chosen = bf.DistributedOptimizer(plain, model, name).communication
        return COMMUNICATIONS[chosen].how

    assert LoopbackWorld(2).run(case) == [ALGORITHMS[name].how[0]] * 2


# graphs that a method cannot live with


def lopsided(n=4):
    """Rows sum to one, columns do not: everybody listens to rank 0 too much."""
    graph = nx.DiGraph(name=f"lopsided({n})")
    for rank in range(n):
        graph.add_edge(rank, rank, weight=0.5)
        graph.add_edge(0 if rank else n - 1, rank, weight=0.5)
    return graph


def swap():
    """Two ranks that exchange their models: eigenvalue −1."""
    graph = nx.DiGraph(name="swap(2)")
    graph.add_weighted_edges_from([(0, 0, 0.0), (1, 1, 0.0), (0, 1, 1.0), (1, 0, 1.0)])
    return graph


@pytest.mark.parametrize(
    "name", [name for name in MIXING if ALGORITHMS[name].needs.doubly_stochastic]
)
@on_each_rank(ranks=4)
def test_a_graph_that_moves_the_mean_is_refused(name):
    """The message names method, graph and reason, and a graph that works."""
    words = (
        rf"{name} cannot run on lopsided\(4\): its weights are not doubly stochastic "
        r"\(what rank 0 gives sums to 2\).* Use topology\.(lazy_weights\(topology\.)?"
        r"(exponential_two|ring)\(4\)\)? instead"
    )
    with pytest.raises(topology.TopologyError, match=words):
        fit(name, lopsided(), 1)
    if ALGORITHMS[name]().default_topology(4) is None:
        bf.set_topology(lopsided())
        with pytest.raises(topology.TopologyError, match=words):
            fit(name, None, 1)
    fit(name, fitting_graph(name, 4), 1)


@pytest.mark.parametrize("name", [n for n in MIXING if ALGORITHMS[n].needs in STRONGLY_CONNECTED])
def test_a_graph_that_leaves_ranks_out_is_refused(name):
    """Some other method of averaging needs doubly stochastic weights; this one, a way to all."""
    graph = topology.push_weights(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 1)], name="rho(4)"))

    def case():
        words = (
            rf"{name} cannot run on rho\(4\): nothing of rank 1 ever reaches rank 0, .*strongly "
            r"connected. Use topology.(exponential_two|ring)\(4\) instead"
        )
        with pytest.raises(topology.TopologyError, match=words):
            fit(name, graph, 1)
        bf.set_topology(graph)
        with pytest.raises(topology.TopologyError, match=words):
            fit(name, None, 1)
        edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
        fit(name, topology.push_weights(nx.DiGraph(edges)), 1)

    LoopbackWorld(4).run(case)


@pytest.mark.parametrize(
    "name", [n for n in MIXING if n not in ONE_SIDED and not ALGORITHMS[n].needs.tree]
)
@on_each_rank(ranks=4)
def test_weights_set_by_hand_are_the_users_own(name):
    """Where all weights are given, the topology in use is not asked."""
    bf.set_topology(lopsided())
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bf.DistributedOptimizer(plain, model, name)
    other = 1 - bf.rank() if bf.rank() < 2 else 5 - bf.rank()
    optimizer.self_weight, optimizer.src_weights = 0.5, {other: 0.5}
    optimizer.dst_weights = [other]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", [name for name in MIXING if ALGORITHMS[name].needs.tree])
@on_each_rank(ranks=4)
def test_weights_set_by_hand_follow_the_edges_of_the_tree(name):
    """What a stranger has relayed before is not known."""
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bf.DistributedOptimizer(plain, model, name, topology=topology.tree(4))
    after, before = (bf.rank() + 1) % 4, (bf.rank() - 1) % 4
    optimizer.self_weight, optimizer.src_weights = 0.5, {before: 0.5}
    optimizer.dst_weights = [after]
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(bf.ArgumentError, match=r"dst_weights: .* relays along the edges"):
        optimizer.step()


@pytest.mark.parametrize("name", [n for n in ONE_SIDED if ALGORITHMS[n].how[0].windowed])
@on_each_rank(ranks=4)
def test_weights_set_by_hand_follow_the_edges_of_the_windows(name):
    """Who publishes must have a window to publish in: strangers are refused by name."""
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = topology.ring(4, style="right")
    options = {"topology": graph, **EACH_STEP.get(name, {})}
    optimizer = bf.DistributedOptimizer(plain, model, name, **options)
    before, after = (bf.rank() - 1) % 4, (bf.rank() + 1) % 4
    field = "src_weights" if optimizer.communication == "win_get" else "dst_weights"
    setattr(optimizer, field, {after: 0.5} if field == "src_weights" else [before])
    with pytest.raises(bf.ArgumentError, match=rf"argument {field}: rank \d is not an "):
        optimizer.step()


def test_an_undirected_graph_is_sent_to_metropolis():
    """Both directions of every edge: other weights on the same graph will do."""
    star = topology.uniform_weights(topology.star(5))
    with pytest.raises(topology.TopologyError, match="metropolis_weights"):
        ALGORITHMS["adapt_then_combine"]().check(star)
    ALGORITHMS["adapt_then_combine"]().check(topology.metropolis_weights(star))


def test_a_graph_on_which_a_method_diverges_is_refused():
    """``adapt_with_combine`` needs γ < (1 + λ_min) / L, which no step size fulfils at −1."""
    with pytest.raises(topology.TopologyError, match=r"smallest eigenvalue is -1, .* above -1"):
        ALGORITHMS["adapt_with_combine"]().check(swap())
    ALGORITHMS["adapt_then_combine"]().check(swap())


@pytest.mark.parametrize(
    ("needs", "bad", "good", "words"),
    [
        (
            TopologyRequirements(static_only=True),
            topology.one_peer_exponential(4),
            topology.ring(4),
            "changes",
        ),
        (
            TopologyRequirements(symmetric=True),
            topology.exponential_two(8),
            topology.ring(8),
            "not symmetric",
        ),
        (
            TopologyRequirements(column_stochastic=True),
            lopsided(),
            topology.ring(4),
            "not column-stochastic",
        ),
        (
            TopologyRequirements(doubly_stochastic=True),
            lopsided(),
            topology.star(4),
            "not doubly stochastic",
        ),
        (
            TopologyRequirements(strongly_connected=True),
            nx.DiGraph([(0, 1), (1, 0), (2, 3), (3, 2)]),
            topology.ring(4, style="right"),
            "nothing of rank 0 ever reaches rank 2",
        ),
        (
            TopologyRequirements(min_eigenvalue=-1 / 3, symmetric=True),
            topology.ring(6),
            topology.metropolis_weights(nx.path_graph(3)),
            "smallest eigenvalue is -0.3333",
        ),
    ],
    ids=[
        "static_only",
        "symmetric",
        "column_stochastic",
        "doubly_stochastic",
        "strongly_connected",
        "min_eigenvalue",
    ],
)
def test_each_need_refuses_and_suggests(needs, bad, good, words):
    """What a method needs is asked of the graph; the graph suggested in its place fulfils it."""
    needs.check("a_method", good)
    with pytest.raises(topology.TopologyError, match=words) as caught:
        needs.check("a_method", bad)
    suggestion = str(caught.value).rpartition("Use ")[2].removesuffix(" instead")
    needs.check("a_method", eval(suggestion, {"topology": topology, "graph": bad}))


@on_each_rank(ranks=2)
def test_unknown_methods_and_kinds_name_the_known_ones():
    """A typing error is answered with the nearest name."""
    with pytest.raises(bf.UnknownNameError, match="Did you mean 'adapt_then_combine'"):
        fit("adapt_then_combin", None, 1)
    with pytest.raises(bf.UnknownNameError, match="Did you mean 'allreduce'"):
        fit("adapt_then_combine", None, 1, communication="allreduc")


# what a method of one's own costs


class Damped(Algorithm):
    """Half of the way to the neighbours' average: W is (I + W) / 2."""

    name, what, when = "damped", AveragedQuantity.PARAMETER, CommunicationTiming.AFTER_STEP
    how, needs, exact = (
        (CommunicationPattern.NEIGHBORS,),
        TopologyRequirements(doubly_stochastic=True),
        False,
    )

    def incoming(self, bucket, received):
        bucket.flat.lerp_(received.mixed, 0.5)


class Rounded(Algorithm):
    """Whole numbers travel: what is sent need not be what is kept."""

    name, what, when = "rounded", AveragedQuantity.PARAMETER, CommunicationTiming.BEFORE_FORWARD
    how, needs, exact = (
        (CommunicationPattern.NEIGHBORS,),
        TopologyRequirements(doubly_stochastic=True),
        False,
    )

    def outgoing(self, bucket):
        return bucket.flat.round()


def test_a_method_of_ones_own_is_a_class_with_data_and_a_hook():
    """No registration is needed to try one."""
    w = torch.from_numpy(topology.mixing_matrix(topology.ring(4)))
    start = torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, 10) * 0.3
    run = LoopbackWorld(4).run

    damped = torch.stack(run(fit, Damped, topology.ring(4), 1, start=0.3, lr=0.0))
    torch.testing.assert_close(damped, (start + w @ start) / 2)
    rounded = torch.stack(run(fit, Rounded, topology.ring(4), 1, start=0.3, lr=0.0))
    torch.testing.assert_close(rounded, w @ start.round())


class ProposerTurns(Algorithm):
    """Buckets take turns; where the models began travels along in every second round of each."""

    name, when = "turns", CommunicationTiming.AFTER_STEP
    how = (CommunicationPattern.NEIGHBORS, CommunicationPattern.GLOBAL)
    parameter_state = averaged_state = ("start",)

    def takes_part(self, bucket):
        return bucket.round % 2 == bucket.index

    def travelling_state(self, bucket):
        return {} if bucket.round < 2 else super().travelling_state(bucket)

    def averages_all(self, number):
        return number == 3


def test_a_method_says_what_travels_in_a_round():
    """Of two parameters in a bucket each: one at a time, with the state or without, or over all."""

    def case(rounds):
        model = torch.nn.Linear(1, 1).double()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, bf.rank())
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedOptimizer(
            plain,
            model,
            ProposerTurns,
            topology=topology.ring(4),
            bucket_size_in_mb=1e-6,
            broadcast=False,
        )
        for _ in range(rounds):
            optimizer.step()
        starts = [bucket.state["start"][0] for bucket in optimizer._averager.buckets]
        return torch.stack([*(one.detach().view(()) for one in model.parameters()), *starts])

    w = torch.from_numpy(topology.mixing_matrix(topology.ring(4)))
    ranks = torch.arange(4.0, dtype=torch.float64)
    once, mean = w @ ranks, torch.full((4,), 1.5, dtype=torch.float64)
    expected = [
        (once, ranks, ranks, ranks),
        (once, once, ranks, ranks),
        (w @ once, once, once, ranks),
        (w @ once, mean, once, mean),
    ]
    for rounds, columns in enumerate(expected, 1):
        got = torch.stack(LoopbackWorld(4).run(case, rounds))
        torch.testing.assert_close(got, torch.stack(columns, 1))
