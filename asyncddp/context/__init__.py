"""The running world of this rank: who it is, whom it talks to, how it starts and ends."""

from __future__ import annotations

from asyncddp.context.context import Context, current, is_initialized
from asyncddp.context.lifecycle import init, shutdown
from asyncddp.context.local_world import LocalWorld, local_world

__all__ = [
    "Context",
    "LocalWorld",
    "current",
    "init",
    "is_initialized",
    "local_world",
    "shutdown",
]
