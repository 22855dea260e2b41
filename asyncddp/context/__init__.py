"""Context of one rank: its number, transport, engine and topologies; ``init``, ``shutdown``."""

from asyncddp.context.context import Context, current, is_initialized
from asyncddp.context.lifecycle import init, shutdown

__all__ = ["Context", "current", "init", "is_initialized", "shutdown"]
