"""Context of one rank (number, transport, topologies), with ``init`` and ``shutdown``.

Here belong the start and end of a world, its members, and its current graphs. Verbs, windows and
constructors of the rooms above ask for the current context once; everything else is handed it.
Importing never starts MPI: ``init()`` does, and ``shutdown()`` gives back all that it took.
"""

from asyncddp.context.context import Context, current, is_initialized
from asyncddp.context.lifecycle import init, shutdown

__all__ = ["Context", "current", "init", "is_initialized", "shutdown"]
