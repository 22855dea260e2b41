"""Windows: memory into which neighbours publish without asking, and from which each reads at will.

A *writer* publishes a tensor to a *reader* along an edge of the topology. On one machine it lays it
down once, in memory that both see, and tells the reader by a few words where it lies
(:mod:`~asyncddp.windows.board`); to other machines it travels by message and is laid down by the
reader's engine (:mod:`~asyncddp.windows.remote`). Either way nobody waits for anybody: a writer
finds room that nobody reads, a reader finds what was published last, whole.
"""

from __future__ import annotations

from asyncddp.windows.buffers import Staleness
from asyncddp.windows.registry import Windows, windows_of
from asyncddp.windows.window import Window

__all__ = ["Staleness", "Window", "Windows", "windows_of"]
