"""What the tests of graphs share: an oracle for W, and arguments for every registered family."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest

from asyncddp import topology

SIZES = (1, 2, 3, 4, 5, 8, 12, 16)
ARGUMENTS: dict[str, Any] = {"degree": 4, "seed": 3, "local_size": 4, "k": 2, "budget": 0.5}


def oracle(graph: nx.DiGraph) -> np.ndarray:
    """W by networkx: W[i, j] is the weight of the edge j -> i."""
    return nx.to_numpy_array(graph, nodelist=range(len(graph))).T


def product(schedule: topology.Schedule, rounds: int) -> np.ndarray:
    """W of the rounds 0, 1, …, the last one leftmost."""
    done = np.eye(schedule.n)
    for k in range(rounds):
        done = oracle(schedule.graph(k)) @ done
    return done


def label(value: Any) -> str:
    """An id of a parametrised test: the name of a graph or schedule, and else the number."""
    named = isinstance(value, (nx.Graph, topology.Schedule))
    return topology.describe(value) if named else str(value)


def build(builder: Callable[..., Any], n: int) -> Any:
    """Call a builder with an argument for every parameter that needs one."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(builder).parameters.items():
        if name == "n":
            given[name] = n
        elif name == "graph":
            given[name] = topology.ring(n)
        elif parameter.default is parameter.empty:
            given[name] = ARGUMENTS[name]
    return builder(**given)


def build_all(builder: Callable[..., Any]) -> dict[int, Any]:
    """A family at all sizes that it serves; where it refuses one, it says what works."""
    built = {}
    for n in SIZES:
        try:
            built[n] = build(builder, n)
        except topology.TopologyError as error:
            if "nearest" not in str(error) and "use " not in str(error):
                pytest.fail(f"the refusal names nothing that works: {error}")
    assert {1, 8, 16} <= set(built), f"{builder.__name__} serves only {sorted(built)}"
    return built
