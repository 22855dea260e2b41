"""Worlds, of which tests here want more than is public."""

import os
from contextlib import closing

from asyncddp.testing.worlds import LoopbackWorld, PoolWorld, World, world_of
from asyncddp.transport import TRANSPORTS

__all__ = [
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

OF_SEVERAL = [name for name, (_, size) in WORLDS.items() if size > 1]
"""Those with somebody to talk to."""

_CHOSEN = os.environ.get("ASYNCDDP_TEST_TRANSPORT")

EVERYWHERE = [
    name
    for name, (transport, _) in WORLDS.items()
    if (transport != "c10d" if _CHOSEN is None else transport == _CHOSEN)
]
"""Worlds of a test that names none: all but those of c10d, on which the tests of transports run.

``scripts/test c10d`` runs all of these tests on it.
"""


def open_transport(name):
    """Open a group of :data:`WORLDS` by name for a ``with`` block."""
    return closing(world_of(*WORLDS[name]))
