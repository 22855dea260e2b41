"""Worlds, of which tests here want more than is public."""

import os
from contextlib import closing

from asyncddp.testing.worlds import LoopbackWorld, PoolWorld, World, world_of
from asyncddp.transport import TRANSPORTS
from tests.support.processes import warm_server

__all__ = [
    "DEFAULT_WORLDS",
    "EVERYWHERE",
    "OF_SEVERAL",
    "WORLDS",
    "LoopbackWorld",
    "PoolWorld",
    "World",
    "open_transport",
]

_SIZES = {"loopback": (1, 2, 4), "c10d": (4,)}

WORLDS = {
    f"{transport}-{size}": (transport, size)
    for transport in TRANSPORTS
    for size in _SIZES.get(transport, (2, 4))
}
"""``{"loopback-4": ("loopback", 4), "mpi-2": ("mpi", 2), …}``"""

DEFAULT_WORLDS = ("loopback-4", "mpi-2")
"""The worlds of the default run."""

_LAWS = ("loopback-1", "loopback-4", "mpi-2", "shared_memory-2", "c10d-4")
"""What finds a fault of any number of ranks among threads, and of any transport on one number."""

OF_SEVERAL = _LAWS[1:]
"""Those with somebody to talk to."""

_CHOSEN = os.environ.get("ASYNCDDP_TEST_TRANSPORT")

EVERYWHERE = [
    name
    for name in _LAWS
    if (WORLDS[name][0] != "c10d" if _CHOSEN is None else WORLDS[name][0] == _CHOSEN)
]
"""Worlds of a test that names none: all but that of c10d, on which the tests of transports run.

``scripts/test c10d`` runs all of these tests on it.
"""


def open_transport(name, frameworks=False):
    """Open a group of :data:`WORLDS` by name for a ``with`` block.

    Args:
        name: One that is there.
        frameworks: Whether its ranks, which are processes, have what
            :func:`tests.support.processes.warm_server` imports for frameworks.
    """
    world = world_of(*WORLDS[name])
    if frameworks:
        world._pool.python = warm_server(frameworks=True).command
    return closing(world)
