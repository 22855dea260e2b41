"""Windows: memory of a rank that neighbours write and read one-sided, without its participation.

A *writer* publishes a tensor to a *reader* along an edge of the topology. On one machine it writes
the tensor once, into shared memory, and tells the reader by a few words where it is
(:mod:`~asyncddp.windows.shared_memory_edge`); to other machines the tensor is sent by message and
stored by the reader's engine (:mod:`~asyncddp.windows.message_edge`). Neither waits for the other:
a writer finds a buffer that nobody reads, a reader finds the newest tensor, whole.
"""

from asyncddp.windows.manager import WindowManager, windows_of
from asyncddp.windows.receive_buffers import Staleness
from asyncddp.windows.window import Window

__all__ = ["Staleness", "Window", "WindowManager", "windows_of"]
