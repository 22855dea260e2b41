"""A graph without weights: uniform averaging, and one notice where that moves the mean."""

import logging

import networkx as nx
import pytest
import torch

import asyncddp as bf
from asyncddp import topology


def _consensus_of(graph: nx.DiGraph) -> list[float]:
    def case() -> float:
        bf.set_topology(graph)
        x = torch.tensor([float(bf.rank())], dtype=torch.float64)
        for _ in range(200):
            x = bf.neighbor_allreduce(x)
        return float(x)

    with bf.local_world(graph.number_of_nodes()) as world:
        return world.run(case)


def test_a_star_without_weights_gives_its_weighted_average_and_one_notice(caplog):
    """Uniform averaging on a star converges to the mean weighted by degree, and warns once."""
    with caplog.at_level(logging.WARNING, logger="asyncddp"):
        found = _consensus_of(nx.DiGraph(nx.star_graph(3)))
    share = torch.tensor([4.0, 2.0, 2.0, 2.0], dtype=torch.float64) / 10  # by degree, self included
    expected = float(share @ torch.arange(4, dtype=torch.float64))
    assert found == pytest.approx([expected] * 4, abs=1e-12)
    notices = [record.message for record in caplog.records]
    assert len(notices) == 1, notices
    assert "no weights" in notices[0]
    assert "metropolis_weights" in notices[0]


@pytest.mark.parametrize("graph", [nx.DiGraph(nx.cycle_graph(4)), topology.star(4)])
def test_no_notice_where_the_mean_is_kept(graph, caplog):
    """A regular graph, or one with weights, converges to the mean without any warning."""
    with caplog.at_level(logging.WARNING, logger="asyncddp"):
        found = _consensus_of(graph)
    assert found == pytest.approx([1.5] * 4, abs=1e-9)
    assert not caplog.records
