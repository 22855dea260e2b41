"""What stands for a topology: a graph or schedule, a function of the number of nodes, or a name."""

from __future__ import annotations

import pytest

from asyncddp import topology
from asyncddp.topology.builders import topology_for

NAMES = [*topology.GRAPHS, *topology.SCHEDULES]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_stands_for_a_graph(name):
    """Each graph and schedule can be had by its name alone, on as many nodes as were asked for."""
    assert topology.as_schedule(topology_for(name, 16)).n == 16


def test_what_is_given_stays():
    """A graph and a schedule are themselves; a function is called with the number of nodes."""
    graph, schedule = topology.ring(4), topology.one_peer_exponential(4)
    assert topology_for(graph, 4) is graph
    assert topology_for(schedule, 4) is schedule
    assert topology_for(lambda n: [n], 7) == [7]
    assert topology.describe(topology_for(topology.ring, 5)) == "ring(5)"


def test_a_name_that_is_none():
    """All names are listed, and the nearest."""
    words = r"argument topology: expected .*one of .*ring.*, got 'rimg'\. Did you mean 'ring'\?"
    with pytest.raises(topology.TopologyError, match=words):
        topology_for("rimg", 4)
