"""Worlds, of which tests here want more than is public."""

from asyncddp.testing.worlds import WORLDS, LoopbackWorld, PoolWorld, World, open_transport

__all__ = ["WORLDS", "LoopbackWorld", "PoolWorld", "World", "open_transport"]
