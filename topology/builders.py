"""Graphs and schedules of n nodes: as they are given, by a function that makes them, or by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from .errors import TopologyError
from .schedule import GraphOrSchedule

if TYPE_CHECKING:
    import networkx as nx

    from .schedule import Schedule

__all__ = ["DEFAULTS", "TopologyLike", "build", "parameters_of", "topology_for"]

Builder: TypeAlias = Callable[..., GraphOrSchedule]
TopologyLike: TypeAlias = Union[
    "nx.DiGraph[int]", "Schedule", Callable[[int], GraphOrSchedule], str
]
"""A graph or schedule, a function that makes one for n nodes, or the name of such a function."""

DEFAULTS: Mapping[str, Any] = {
    "degree": 4, "k": 1, "local_size": 4, "seed": 0, "budget": 0.5, "graph": "ring",
}  # fmt: skip
"""What a name stands for where its function leaves a parameter open."""


def topology_for(given: TopologyLike, n: int) -> GraphOrSchedule:
    """Return the graph or schedule that was given, or that a function or a name makes of n nodes.

    Args:
        given: A graph or schedule, which is returned as it is; a function of the number of nodes;
            or a name in :data:`.topology.GRAPHS` or :data:`.topology.SCHEDULES`, with
            :data:`DEFAULTS`.
        n: Number of nodes: ranks, or machines.

    Returns:
        The graph or schedule.

    Raises:
        TopologyError: None has the name, or there is none of n nodes.

    Example:
        >>> topology_for("one_peer_exponential", 8)
        Schedule(name='one_peer_exponential(8)', n=8, period=3)
    """
    if not isinstance(given, str):
        return given(n) if callable(given) else given
    from .families import GRAPHS, SCHEDULES  # which load networkx

    known: dict[str, Builder] = {**GRAPHS, **SCHEDULES}
    if given not in known:
        near = difflib.get_close_matches(given, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TopologyError(
            f"argument topology: expected a graph, a schedule, a function of the number of nodes, "
            f"or one of {', '.join(sorted(known))}, got {given!r}.{hint}"
        )
    return build(known[given], n, {})


def parameters_of(builder: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that makes a graph, beside the number of nodes."""
    every = inspect.signature(builder).parameters
    return {name: parameter for name, parameter in every.items() if name != "n"}


def build(builder: Builder, n: int, options: Mapping[str, Any]) -> GraphOrSchedule:
    """Make a graph or schedule of n nodes by those of the options that its function has.

    Args:
        builder: The function.
        n: Number of nodes.
        options: By name; ``shape`` as a pair, or in words such as ``"4x8"``.

    Raises:
        TopologyError: There is none of that kind.
    """
    arguments: dict[str, Any] = {
        name: options.get(name, DEFAULTS.get(name))
        for name, parameter in parameters_of(builder).items()
        if name in options or parameter.default is parameter.empty
    }
    if isinstance(arguments.get("shape"), str):
        sides = arguments["shape"].split("x")
        arguments["shape"] = tuple(int(side) if side.isdecimal() else side for side in sides)
    if "graph" not in arguments:
        return builder(n, **arguments)
    from .families import GRAPHS

    return builder(build(GRAPHS[arguments.pop("graph")], n, options), **arguments)
