"""BlueFog's names on ranks: the world, its topologies, and who may send to whom.

The rules are those of BlueFog's own tests of basics, on four ranks as there.
"""

from __future__ import annotations

import importlib.util
import math

import networkx as nx
import numpy as np
import pytest
import torch

import asyncddp
import asyncddp.integrations.bluefog as bf
from tests.support import LoopbackWorld, on

worlds = on("loopback-4", "shared_memory-4")
GRAPHS = [
    bf.ExponentialTwoGraph,
    bf.RingGraph,
    bf.StarGraph,
    bf.MeshGrid2DGraph,
    bf.FullyConnectedGraph,
]


def world_as_it_is():
    bf.init()
    r, n = bf.rank(), bf.size()
    assert (r, n) == (asyncddp.rank(), asyncddp.size())
    assert (bf.local_rank(), bf.local_size()) == (r, n)
    assert (bf.machine_rank(), bf.machine_size()) == (0, 1)
    assert bf.is_initialized()
    assert bf.is_available()
    assert bf.is_homogeneous() is True
    assert bf.mpi_threads_supported() in (0, 1)
    assert bf.unified_mpi_window_model_supported() is True
    assert bf.nccl_built() is (importlib.util.find_spec("cupy") is not None)
    assert bf.get_skip_negotiate_stage() is False
    bf.set_skip_negotiate_stage(True)
    assert bf.get_skip_negotiate_stage() is True
    bf.barrier()


@on("loopback-1", "loopback-4", "shared_memory-4")
def test_the_world(world):
    """Ranks, sizes, and what was built in."""
    world.run(world_as_it_is)


def the_default_topology():
    bf.init()
    r, n = bf.rank(), bf.size()
    assert bf.IsTopologyEquivalent(bf.load_topology(), bf.ExponentialGraph(n))
    assert bf.is_topo_weighted() is False
    steps = range(math.ceil(math.log2(n)))
    assert bf.in_neighbor_ranks() == sorted((r - 2**i) % n for i in steps)
    assert bf.out_neighbor_ranks() == sorted((r + 2**i) % n for i in steps)
    if n == 4:
        expected = [[1.0 if (j - i) % 4 in (0, 1, 2) else 0.0 for j in range(4)] for i in range(4)]
        assert np.allclose(nx.to_numpy_array(bf.load_topology()), np.array(expected) / 3)
    ring = bf.RingGraph(n)
    assert bf.set_topology(ring) is True
    assert bf.load_topology() is ring
    assert bf.in_neighbor_ranks() == bf.out_neighbor_ranks() == sorted({(r - 1) % n, (r + 1) % n})
    assert bf.set_topology() is True
    assert bf.in_neighbor_ranks() == sorted((r - 2**i) % n for i in steps)


@worlds
def test_the_default_topology_and_neighbours(world):
    """Exponential-2 before anything is set, and when None is."""
    world.run(the_default_topology)


def on_one_rank():
    bf.init(bf.RingGraph)
    assert bf.in_neighbor_ranks() == bf.out_neighbor_ranks() == []
    assert nx.to_numpy_array(bf.load_topology()).tolist() == [[1.0]]


@on("loopback-1")
def test_one_rank_has_no_neighbours(world):
    """A ring on one rank has the weight matrix [[1]], and the rank has no neighbours."""
    world.run(on_one_rank)


def with_open_windows(n):
    bf.init()
    assert bf.win_create(torch.ones(3), "x")
    assert bf.set_topology(bf.RingGraph(n)) is False
    assert bf.IsTopologyEquivalent(bf.load_topology(), bf.ExponentialGraph(n))
    assert bf.set_topology(bf.ExponentialGraph(n)) is True, "nothing changes"
    assert bf.set_topology(bf.ExponentialGraph(n), is_weighted=True) is False
    assert bf.win_free()
    assert bf.set_topology(bf.RingGraph(n)) is True


def test_windows_keep_the_topology(caplog):
    """False and an error in the log in place of an exception; an equal one may be set."""
    LoopbackWorld(4).run(with_open_windows, 4)
    assert "kept the topology as it is, since the windows 'x' lie along its edges" in caplog.text


@on("shared_memory-4")
def test_windows_keep_the_topology_among_processes(world):
    """While windows exist, set_topology returns False for another graph on every process."""
    world.run(with_open_windows, 4)


def topologies_that_cannot_be():
    n = bf.size()
    with pytest.raises(TypeError, match=r"expected a networkx\.DiGraph, got Graph"):
        bf.set_topology(nx.path_graph(n))
    with pytest.raises(TypeError, match=r"expected a graph on size\(\) = 4 nodes, got 5"):
        bf.set_topology(bf.RingGraph(n + 1))
    with pytest.raises(ValueError, match="expected a graph, got None"):
        bf.set_machine_topology(None)
    with pytest.raises(TypeError, match=r"machine_size\(\) = 1 nodes, got 4"):
        bf.set_machine_topology(bf.RingGraph(n))
    strange = nx.relabel_nodes(bf.RingGraph(n), {0: "a"})
    with pytest.raises(ValueError, match="not node 0"):
        bf.set_topology(strange)


@on("loopback-4")
def test_topologies_that_cannot_be(world):
    """``TypeError`` for graphs that are none or of another size, as in BlueFog."""
    world.run(topologies_that_cannot_be)


def weights_count_where_asked():
    bf.init(bf.StarGraph, is_weighted=True)
    assert bf.is_topo_weighted()
    x = torch.full((3,), float(bf.rank()), dtype=torch.float64)
    weighted = bf.neighbor_allreduce(x)[0].item()
    assert bf.set_topology(bf.StarGraph(bf.size()), is_weighted=False), "the flag counts too"
    assert not bf.is_topo_weighted()
    uniform = bf.neighbor_allreduce(x)[0].item()
    assert asyncddp.load_topology() is not bf.load_topology()
    asyncddp.set_topology(bf.RingGraph(bf.size()))
    assert asyncddp.load_topology() is bf.load_topology()
    return weighted, uniform


@worlds
def test_weights_of_a_graph_count_where_asked(world):
    """Unweighted topologies average uniformly whatever the edges say."""
    got = world.run(weights_count_where_asked)
    weighted = [1.5, 0.75, 1.5, 2.25]
    uniform = [1.5, 0.5, 1.0, 1.5]
    assert got == [pytest.approx(pair, abs=1e-12) for pair in zip(weighted, uniform, strict=True)]


def infer(index):
    bf.init()
    n = bf.size()
    bf.set_topology(GRAPHS[index](n))
    sources, targets = bf.in_neighbor_ranks(), bf.out_neighbor_ranks()
    assert bf.InferSourceFromDestinationRanks(targets) == sources
    assert bf.InferDestinationFromSourceRanks(sources) == targets
    positive = (nx.to_numpy_array(bf.load_topology(), nodelist=range(n)) > 0).astype(float)
    expected = positive / positive.sum(axis=0)
    for function, given, found in (
        (bf.InferSourceFromDestinationRanks, targets, sources),
        (bf.InferDestinationFromSourceRanks, sources, targets),
    ):
        ranks, matrix = function(given, construct_adjacency_matrix=True)
        assert ranks == found
        assert np.allclose(matrix, expected, atol=1e-15)


@worlds
@pytest.mark.parametrize("index", range(len(GRAPHS)))
def test_neighbours_are_inferred(world, index):
    """Each direction from the other, and the matrix, whose columns sum to 1 on a star too."""
    world.run(infer, index)


def infer_from_what_cannot_be():
    r, n = bf.rank(), bf.size()
    for wrong in ([r], [n], [-1], [0.5], [(r + 1) % n] * 2):
        with pytest.raises(AssertionError, match=rf"dst_ranks: expected ranks .* other than {r}"):
            bf.InferSourceFromDestinationRanks(wrong)


@on("loopback-4")
def test_neighbours_that_cannot_be(world):
    """Nothing was sent by then: all ranks go on."""
    world.run(infer_from_what_cannot_be)


def suspended():
    bf.init()
    bf.win_create(torch.ones(2), "x")
    bf.suspend()
    for call in (
        lambda: bf.allreduce(torch.ones(2)),
        lambda: bf.neighbor_allreduce_nonblocking(torch.ones(2)),
        lambda: bf.win_put(torch.ones(2), "x"),
        bf.barrier,
    ):
        with pytest.raises(ValueError, match=r"suspended by bf\.suspend\(\); call bf\.resume\(\)"):
            call()
    bf.resume()
    assert bf.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


@worlds
def test_suspend_and_resume(world):
    """While suspended each verb raises, and nothing is sent."""
    world.run(suspended)


def objects():
    bf.init()
    r = bf.rank()
    assert bf.broadcast_object({"rank": r}, src=1) == {"rank": 1}
    listed = [r, {"rank": r}, torch.full((2,), float(r))]
    assert bf.broadcast_object_list(listed, src=2, device="cpu", name="l") is None
    assert listed[:2] == [2, {"rank": 2}]
    assert listed[2].tolist() == [2.0, 2.0]
    assert bf.broadcast_object_list([]) is None
    tensors = {"b": torch.full((2,), float(r)), "a": torch.full((3,), r)}
    bf.broadcast_parameters(tensors, root_rank=3)
    assert tensors["a"].tolist() == [3, 3, 3]
    tensors["b"].fill_(float(r))
    bf.allreduce_parameters(tensors)
    assert tensors["b"].tolist() == [1.5, 1.5]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + r))
    before = [p.clone() for p in model.parameters()]
    bf.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(map(torch.equal, before, model.parameters()))


@worlds
def test_objects_parameters_and_state(world):
    """Numbers arrive exactly, and no parameter moves."""
    world.run(objects)


def test_machines_may_be_simulated_by_bluefogs_variable(monkeypatch):
    """``BLUEFOG_NODES_PER_MACHINE`` in a world that ``bf.init()`` makes."""
    monkeypatch.setenv("BLUEFOG_NODES_PER_MACHINE", "1")
    monkeypatch.setenv("ASYNCDDP_TRANSPORT", "loopback")
    try:
        bf.init()
        assert (bf.local_size(), bf.machine_size()) == (1, 1)
        assert asyncddp.current().config.ranks_per_machine == 1
    finally:
        bf.shutdown()
