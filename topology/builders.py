"""Building of graphs and schedules for n nodes from a name, a function, or a given graph."""

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
"""Default values of the parameters that functions of a name require."""


def topology_for(given: TopologyLike, n: int) -> GraphOrSchedule:
    """Return a graph or schedule of n nodes: given itself, by a function, or by its name.

    Args:
        given: A graph or schedule, which is returned unchanged; a function of the number of nodes;
            or a name in :data:`.topology.GRAPHS` or :data:`.topology.SCHEDULES`, with
            :data:`DEFAULTS`.
        n: Number of nodes: ranks, or machines.

    Returns:
        The graph or schedule.

    Raises:
        TopologyError: The name is unknown, or there is no such graph of n nodes.

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
    """Return the parameters of a graph-building function, except the number of nodes."""
    every = inspect.signature(builder).parameters
    return {name: parameter for name, parameter in every.items() if name != "n"}


def build(builder: Builder, n: int, options: Mapping[str, Any]) -> GraphOrSchedule:
    """Build a graph or schedule of n nodes, passing the options that its function has.

    Args:
        builder: The function.
        n: Number of nodes.
        options: Values by parameter name; ``shape`` as a pair, or as a string such as ``"4x8"``.

    Raises:
        TopologyError: There is no such graph.
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
