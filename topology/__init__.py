"""Communication topologies: graphs of the ranks that average, and schedules of graphs by round.

Convention: ``W[i, j]`` is the weight that rank i gives to the value of rank j. In the graph it is
the weight of the edge ``j -> i``: ``graph[j][i]["weight"] == W[i, j]``. Every graph has the nodes
0..n-1, self-loops, and a float64 ``weight`` on every edge.

The public names are loaded on first use; the stub beside this file lists them, a line each.

The package is ``asyncddp.topology``; ``import topology`` gives the same modules. A user's own
``topology.py`` takes that short name, and the library works all the same.

It needs networkx, numpy and lazy_loader; neither MPI nor torch. networkx is loaded with
the first graph.
"""

import difflib
import re

import lazy_loader

if __name__ == "topology":
    from asyncddp.topology import __all__, __dir__, _load, _short_name

    _short_name.install()
else:
    _load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Load a public name on first use.

    Raises:
        AttributeError: There is none of that name; the message names the nearest, also for names
            such as RingGraph.
    """
    if name in __all__:
        return _load(name)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removesuffix("_graph")
    near = [] if name.startswith("_") else difflib.get_close_matches(snake, __all__, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
