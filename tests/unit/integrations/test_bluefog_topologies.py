"""BlueFog's graphs and schedules: weights and turns as BlueFog 0.3 gives them."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

import asyncddp.integrations.bluefog as bf
from asyncddp.integrations.bluefog import topology_util


def row(graph, rank):
    return nx.to_numpy_array(graph, nodelist=range(len(graph)))[rank].tolist()


def offsets(graph):
    return sorted(j for j in graph.successors(0) if j != 0)


ROWS = [
    (bf.ExponentialTwoGraph(8), 0, [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0, 0, 0]),
    (bf.ExponentialTwoGraph(4), 0, [1 / 3, 1 / 3, 1 / 3, 0]),
    (bf.RingGraph(4), 0, [1 / 3, 1 / 3, 0, 1 / 3]),
    (bf.RingGraph(4, 1), 0, [1 / 2, 0, 0, 1 / 2]),
    (bf.RingGraph(4, connect_style=2), 0, [1 / 2, 1 / 2, 0, 0]),
    (bf.RingGraph(1), 0, [1]),
    *((bf.RingGraph(2, style), 1, [1 / 2, 1 / 2]) for style in (0, 1, 2)),
    (bf.StarGraph(4), 0, [1 / 4] * 4),
    (bf.StarGraph(4, center_rank=2), 0, [3 / 4, 0, 1 / 4, 0]),
    (bf.FullyConnectedGraph(5), 3, [1 / 5] * 5),
    (bf.MeshGrid2DGraph(4), 0, [1 / 3, 1 / 3, 1 / 3, 0]),
    (bf.MeshGrid2DGraph(6), 0, [5 / 12, 1 / 4, 0, 1 / 3, 0, 0]),
    (bf.MeshGrid2DGraph(6), 1, [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]),
    (bf.MeshGrid2DGraph(5), 0, [2 / 3, 1 / 3, 0, 0, 0]),
    (bf.MeshGrid2DGraph(9), 4, [0, 1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 0, 1 / 5, 0]),
    (bf.MeshGrid2DGraph(9), 1, [1 / 4, 0.3, 1 / 4, 0, 1 / 5, 0, 0, 0, 0]),
    (bf.MeshGrid2DGraph(9, shape=(3, 3)), 0, [0.5, 1 / 4, 0, 1 / 4, 0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("graph", "rank", "expected"), ROWS)
def test_rows_of_the_adjacency_matrix(graph, rank, expected):
    """Row i is what i sends; numbers are those that BlueFog gives."""
    assert row(graph, rank) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (bf.ExponentialGraph(12, base=3), [1, 3, 9]),
        (bf.ExponentialGraph(300, base=3), [1, 3, 9, 27, 81, 243]),
        (bf.SymmetricExponentialGraph(12), [1, 4, 8, 11]),
        (bf.SymmetricExponentialGraph(8), [1, 4, 7]),
        (bf.SymmetricExponentialGraph(16, base=4), [1, 4, 12, 15]),
    ],
)
def test_offsets_and_uniform_weights_of_exponential_graphs(graph, expected):
    """Also 243 = 3^5, which a logarithm in floats misses."""
    assert offsets(graph) == expected
    weights = {weight for _, _, weight in graph.edges(data="weight")}
    assert all(weight == pytest.approx(1 / (len(expected) + 1), abs=1e-15) for weight in weights)


@pytest.mark.parametrize(
    ("graph", "share"),
    [
        (bf.ExponentialTwoGraph(4), 1 / 3),
        (bf.ExponentialGraph(6), 1 / 4),
        (bf.SymmetricExponentialGraph(12), 1 / 5),
        (bf.RingGraph(7), 1 / 3),
        (bf.FullyConnectedGraph(7), 1 / 7),
    ],
)
def test_equal_weights_are_equal_to_the_last_bit(graph, share):
    """Scripts compare them with the fraction, self-loops included."""
    assert {weight for _, _, weight in graph.edges(data="weight")} == {share}


def test_a_star_has_the_fractions_of_bluefog():
    """1 / n at the centre, 1 − 1 / n at the leaves."""
    graph = bf.StarGraph(7, center_rank=3)
    assert {weight for i, j, weight in graph.edges(data="weight") if 3 in (i, j)} == {1 / 7}
    assert graph[0][0]["weight"] == 1 - 1 / 7


def test_weights_of_receiving_and_sending_are_columns_and_rows():
    """By label: a graph whose nodes were added in another order gives the same."""
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(2, 2, 0.9), (2, 0, 0.1), (0, 0, 0.5), (0, 1, 0.5), (1, 2, 1.0)])
    assert bf.GetRecvWeights(graph, 0) == (0.5, {2: 0.1})
    assert bf.GetSendWeights(graph, 2) == (0.9, {0: 0.1})
    assert bf.GetRecvWeights(graph, 1) == (0.0, {0: 0.5})
    ordered = nx.DiGraph()
    ordered.add_nodes_from(range(3))
    ordered.add_weighted_edges_from(graph.edges(data="weight"))
    assert bf.IsTopologyEquivalent(graph, ordered)


def test_equivalence_and_regularity():
    """Edges and weights count; None is equivalent to nothing."""
    assert bf.IsTopologyEquivalent(bf.ExponentialGraph(8), bf.ExponentialTwoGraph(8))
    assert not bf.IsTopologyEquivalent(bf.RingGraph(8), bf.RingGraph(8, 1))
    assert not bf.IsTopologyEquivalent(bf.RingGraph(8), bf.RingGraph(6))
    assert not bf.IsTopologyEquivalent(None, bf.RingGraph(6))
    assert bf.IsRegularGraph(bf.ExponentialGraph(7))
    assert not bf.IsRegularGraph(bf.StarGraph(5))


def test_powers_are_told_in_whole_numbers():
    """``isPowerOf`` is exact where logarithms are not."""
    assert all(bf.isPowerOf(base**k, base) for base in (2, 3, 10) for k in range(12))
    assert not any(bf.isPowerOf(base**k + 1, base) for base in (3, 10) for k in range(1, 12))


def turns(make, size, count):
    """For each turn the target of each rank; and that sources are those who send."""
    generators = [make(rank) for rank in range(size)]
    found = []
    for _ in range(count):
        now = [next(generator) for generator in generators]
        for rank, (_, sources) in enumerate(now):
            assert sources == [j for j in range(size) if rank in now[j][0]]
        found.append([targets[0] if targets else None for targets, _ in now])
    return found


def test_one_peer_of_a_graph():
    """Clockwise turns; on a mesh a rank may receive from none or from two."""

    def of(graph, count):
        size = len(graph)
        return turns(lambda rank: bf.GetDynamicOnePeerSendRecvRanks(graph, rank), size, count)

    assert of(bf.ExponentialTwoGraph(4), 3) == [[1, 2, 3, 0], [2, 3, 0, 1], [1, 2, 3, 0]]
    assert of(bf.RingGraph(4), 2) == [[1, 2, 3, 0], [3, 0, 1, 2]]
    assert [turn[0] for turn in of(bf.ExponentialTwoGraph(8), 4)] == [1, 2, 4, 1]
    assert of(bf.StarGraph(4), 4) == [[1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0], [1, 0, 0, 0]]
    assert of(bf.MeshGrid2DGraph(6), 1) == [[1, 2, 5, 4, 5, 2]]


def test_machines_exponential():
    """Distances 1, 2, 4, … between machines."""

    def of(size, local, count):
        make = bf.GetExp2DynamicSendRecvMachineRanks
        generator = make(
            world_size=size, local_size=local, self_rank=local, local_rank=0
        )  # machine 1
        return list(itertools.islice(generator, count))

    assert of(4, 2, 2) == [([0], [0]), ([0], [0])]
    assert of(8, 2, 3) == [([2], [0]), ([3], [3]), ([2], [0])]
    assert [send[0] for send, _ in of(12, 2, 4)] == [2, 3, 5, 2]


def test_inner_outer_schedules():
    """Machine 0 of two machines with four ranks, turn by turn."""

    def of(make, count):
        return [turn[:4] for turn in turns(lambda rank: make(8, 4, rank), 8, count)]

    ring = [[4, 2, 3, 1], [2, 5, 3, 0], [1, 3, 6, 0], [1, 2, 0, 7]]
    assert of(bf.GetInnerOuterRingDynamicSendRecvRanks, 4) == ring
    expo = [[4, 2, 3, 1], [3, 5, 0, 2], [1, 3, 6, 0], [2, 0, 1, 7]]
    assert of(bf.GetInnerOuterExpo2DynamicSendRecvRanks, 5) == [*expo, expo[0]]
    alone = bf.GetInnerOuterExpo2DynamicSendRecvRanks(4, 4, 0)
    assert next(alone) == ([], []), "the rank whose turn it is has no machine to go to"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bf.RingGraph(4, 3), "connect_style: expected 0, 1 or 2, got 3"),
        (lambda: bf.MeshGrid2DGraph(6, (2, 2)), r"rows \* columns = n = 6"),
        (lambda: bf.ExponentialGraph(0), "n >= 1, got n=0"),
        (lambda: bf.isPowerOf(4, 1), "base: expected a whole number of at least 2"),
        (lambda: bf.isPowerOf(0, 2), "x: expected at least 1, got 0"),
        (lambda: bf.GetExp2DynamicSendRecvMachineRanks(4, 2, 1, 0), "expected two machines"),
        (lambda: bf.GetExp2DynamicSendRecvMachineRanks(4, 4, 1, 1), "expected two machines"),
        (lambda: bf.GetInnerOuterRingDynamicSendRecvRanks(8, 2, 0), "local_size >= 3"),
        (lambda: bf.GetInnerOuterExpo2DynamicSendRecvRanks(8, 3, 0), "divides n"),
    ],
)
def test_arguments_that_cannot_be(call, message):
    """An ``AssertionError`` as in BlueFog, with words; a ``TopologyError`` of ours too."""
    with pytest.raises(AssertionError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)


def test_the_module_has_the_functions_of_the_package():
    """``topology_util`` is BlueFog's module of that name."""
    assert all(getattr(topology_util, name) is getattr(bf, name) for name in topology_util.__all__)
    assert np.array_equal(
        nx.to_numpy_array(topology_util.FullyConnectedGraph(2)), np.full((2, 2), 0.5)
    )
