"""Tables of the functions that build a graph or a schedule for n ranks, keyed by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import graphs, schedules
from .schedule import Schedule

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["GRAPHS", "SCHEDULES"]


def _public_functions(package: ModuleType) -> dict[str, Any]:
    """Return the public functions of a package's modules, by name."""
    files = [file.name for file in pkgutil.iter_modules(package.__path__)]
    modules = [import_module(f"{package.__name__}.{name}") for name in files if name[0] != "_"]
    return {name: getattr(module, name) for module in modules for name in sorted(module.__all__)}


GRAPHS: dict[str, Callable[..., nx.DiGraph[int]]] = _public_functions(graphs)
"""Functions that build a graph for n ranks, keyed by name."""
SCHEDULES: dict[str, Callable[..., Schedule]] = _public_functions(schedules)
"""Functions that build a schedule for n ranks, keyed by name."""
