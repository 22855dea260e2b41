"""Which worlds a test runs on, as pytest parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.worlds import WORLDS

__all__ = ["on", "parameters"]


def parameters(names: Iterable[str]) -> list[Any]:
    """Pytest parameters, marked ``mpi(ranks)`` where the ranks are processes."""
    found = []
    for name in names:
        transport, size = WORLDS[name]
        marks = [] if transport == "loopback" else [pytest.mark.mpi(size)]
        found.append(pytest.param(name, marks=marks, id=name))
    return found


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test that takes ``world`` on these worlds only.

    Args:
        *names: Names of :data:`tests.support.worlds.WORLDS`, or of a transport, for all its worlds.
    """
    chosen = [
        world for world, (transport, _) in WORLDS.items() if world in names or transport in names
    ]
    unknown = set(names) - set(WORLDS) - {transport for transport, _ in WORLDS.values()}
    if unknown:
        raise ValueError(f"unknown worlds {sorted(unknown)}; known are {sorted(WORLDS)}")
    return pytest.mark.parametrize("world", parameters(chosen), indirect=True)
