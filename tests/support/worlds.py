"""Worlds, of which tests here want more than is public."""

from contextlib import closing

from asyncddp.testing.worlds import LoopbackWorld, PoolWorld, World, world_of
from asyncddp.transport import TRANSPORTS

__all__ = ["WORLDS", "LoopbackWorld", "PoolWorld", "World", "open_transport"]

WORLDS = {
    f"{transport}-{size}": (transport, size)
    for transport in TRANSPORTS
    for size in ((1, 2, 4) if transport == "loopback" else (2, 4))
}
"""``{"loopback-4": ("loopback", 4), "mpi-2": ("mpi", 2), …}``"""


def open_transport(name):
    """Open a group of :data:`WORLDS` by name for a ``with`` block."""
    return closing(world_of(*WORLDS[name]))
