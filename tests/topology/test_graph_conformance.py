"""Every registered family keeps the contract; a new one is picked up by its registration alone."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from asyncddp import topology
from asyncddp.topology import GRAPHS, SCHEDULES
from tests.topology.graph_cases import build, build_all, oracle

SYMMETRIC_GRAPHS = [
    "complete",
    "grid_2d",
    "hypercube",
    "random_regular",
    "ring",
    "star",
    "tree",
    "symmetric_exponential",
    "torus_2d",
]
SYMMETRIC_SCHEDULES = [
    "alternating_exponential_ring",
    "base_k",
    "matcha",
    "matching_decomposition",
    "one_peer_hypercube",
    "random_matching",
    "shift_one",
    "simple_base_k",
]
ROUNDS = 7


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_has_ranks_self_loops_and_float_weights(name):
    """Each family gives a connected ``DiGraph`` on 0..n−1 with self-loops and float weights."""
    for n, graph in build_all(GRAPHS[name]).items():
        assert type(graph) is nx.DiGraph
        assert list(graph) == list(range(n))
        assert all(graph.has_edge(rank, rank) for rank in range(n))
        assert all(type(weight) is float for _, _, weight in graph.edges(data="weight"))
        assert graph.graph["name"].startswith(f"{name}({n}")
        topology.check_graph(graph, n, connected=True)


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_is_doubly_stochastic_and_symmetric_as_documented(name):
    """Rows and columns of every family sum to one; of families listed as symmetric, W = Wᵀ."""
    for graph in build_all(GRAPHS[name]).values():
        w = oracle(graph)
        np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-14)
        np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-14)
        assert topology.is_doubly_stochastic(graph)
        if name in SYMMETRIC_GRAPHS:
            np.testing.assert_allclose(w, w.T, atol=1e-15)
            assert topology.is_symmetric(graph)


@pytest.mark.parametrize("name", sorted(set(GRAPHS) - set(SYMMETRIC_GRAPHS)))
def test_directed_graph_is_told_from_a_symmetric_one(name):
    """At n = 8 W ≠ Wᵀ in all other families, and ``is_symmetric`` is false."""
    graph = build_all(GRAPHS[name])[8]
    assert not np.allclose(oracle(graph), oracle(graph).T)
    assert not topology.is_symmetric(graph)


def _views(schedule, k):
    return [schedule.neighbors(rank, k) for rank in range(schedule.n)]


def _assert_consistent(schedule, k, graph):
    """Records agree with the graph, and a rank receives exactly what is sent to it."""
    views = _views(schedule, k)
    expected = oracle(graph)
    for rank, view in enumerate(views):
        row = np.zeros(schedule.n)
        row[rank] = view.self_weight
        for source, weight in view.src_weights.items():
            row[source] = weight
        np.testing.assert_array_equal(row, expected[rank])
        assert rank not in view.src_weights
        assert list(view.src_weights) == sorted(view.src_weights)
        assert list(view.dst_ranks) == sorted(set(view.dst_ranks) - {rank})
        assert type(view.self_weight) is float
        assert all(type(j) is int and type(w) is float for j, w in view.src_weights.items())
        assert all(type(j) is int for j in view.dst_ranks)
    sent = {(i, j) for i, view in enumerate(views) for j in view.dst_ranks}
    received = {(j, i) for i, view in enumerate(views) for j in view.src_weights}
    assert sent == received


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_serves_as_a_schedule_of_period_one(name):
    """``as_schedule`` gives period 1, the graph's name, and its neighbours in each round."""
    for n, graph in build_all(GRAPHS[name]).items():
        schedule = topology.as_schedule(graph)
        assert (schedule.n, schedule.period) == (n, 1)
        assert schedule.name == topology.describe(graph) == topology.describe(schedule)
        _assert_consistent(schedule, 5, graph)
        assert all(
            topology.neighbors_of(graph, rank) == schedule.neighbors(rank, 3) for rank in range(n)
        )
        np.testing.assert_array_equal(oracle(schedule.graph(2)), oracle(graph))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_neighbors_agree_with_graph_in_every_round(name):
    """In each round the ``neighbors`` of all ranks hold exactly the weights of ``graph``."""
    for n, schedule in build_all(SCHEDULES[name]).items():
        assert schedule.n == n
        assert schedule.name.startswith(f"{name}(")
        for k in range(ROUNDS):
            graph = schedule.graph(k)
            topology.check_graph(graph, n)
            assert list(graph) == list(range(n))
            assert all(graph.has_edge(rank, rank) for rank in range(n))
            _assert_consistent(schedule, k, graph)
            assert topology.neighbors_of(schedule, n - 1, k) == schedule.neighbors(n - 1, k)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_doubly_stochastic_and_symmetric_as_documented(name):
    """Each round's rows and columns sum to one, and W = Wᵀ in families listed as symmetric."""
    for schedule in build_all(SCHEDULES[name]).values():
        for k in range(ROUNDS):
            w = oracle(schedule.graph(k))
            np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-14)
            np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-14)
            if name in SYMMETRIC_SCHEDULES:
                np.testing.assert_allclose(w, w.T, atol=1e-15)
        assert topology.is_doubly_stochastic(schedule)
        assert topology.is_symmetric(schedule) or name not in SYMMETRIC_SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_connects_all_ranks_and_repeats_with_its_period(name):
    """A period's union is strongly connected, and rounds k and k + period agree."""
    for n, schedule in build_all(SCHEDULES[name]).items():
        every = range(schedule.period or 40)
        union = nx.compose_all(schedule.graph(k) for k in every)
        assert nx.is_strongly_connected(union)
        if schedule.period:
            for k in (0, 1, schedule.period - 1):
                assert _views(schedule, k) == _views(schedule, k + schedule.period)
        first = list(islice(schedule.iterate(n - 1), 5))
        assert first == [schedule.neighbors(n - 1, k) for k in range(5)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_survives_pickling(name):
    """An unpickled schedule has the same ``repr`` and the same neighbours in every round."""
    schedule = build(SCHEDULES[name], 8)
    copy = pickle.loads(pickle.dumps(schedule))
    assert repr(copy) == repr(schedule)
    assert all(_views(copy, k) == _views(schedule, k) for k in range(ROUNDS))


def fingerprint() -> str:
    """A digest of all families at n = 12 or 16, seeds included."""
    digest = hashlib.sha256()
    for name, builder in sorted({**GRAPHS, **SCHEDULES}.items()):
        n = 16 if name in ("hypercube", "one_peer_hypercube") else 12
        if name == "alternating_exponential_ring":
            n = 8
        schedule = topology.as_schedule(build(builder, n))
        for k in range(ROUNDS):
            digest.update(repr((name, _views(schedule, k))).encode())
    return digest.hexdigest()


@pytest.mark.launches
def test_all_families_are_the_same_in_every_process():
    """Ranks build their schedules alone: nothing may depend on a process' hash seed or state."""
    env = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(Path(__file__).parent)}
    code = (
        "import numpy, random; numpy.random.seed(1); random.seed(1); numpy.random.rand(5)\n"
        "import test_graph_conformance as t; print(t.fingerprint())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == fingerprint()


def test_registries_hold_exactly_the_public_builders():
    """A builder is public under its registered name, has an example, is in one registry."""
    assert set(GRAPHS) | set(SCHEDULES) <= set(topology.__all__)
    for name, builder in {**GRAPHS, **SCHEDULES}.items():
        assert getattr(topology, name) is builder
        assert builder.__name__ == name
        assert "Example:" in builder.__doc__
    assert not set(GRAPHS) & set(SCHEDULES)


def test_conformance_notices_a_family_that_breaks_the_contract():
    """The checks above bite: a schedule whose records contradict each other does not pass."""
    bad = topology.Schedule(
        "bad", 2, 1, lambda rank, k: topology.Neighbors(0.5, {1 - rank: 0.5}, ())
    )
    with pytest.raises(AssertionError):
        _assert_consistent(bad, 0, bad.graph(0))
    with pytest.raises(AssertionError, match="serves only"):
        build_all(lambda n: (_ for _ in ()).throw(topology.TopologyError("use x")))
