"""Windows: memory of a rank that neighbours read and write one-sided, without its participation.

A *writer* publishes a tensor to a *reader* along an edge of the topology. On one machine it writes
the tensor once, into shared memory, and its location into a few words that the reader maps
(:mod:`~asyncddp.windows.shared_memory_edge`). To another machine the tensor is sent by message, and
the reader's engine stores it (:mod:`~asyncddp.windows.message_edge`). Neither side waits for the
other: a writer always gets a buffer that nobody reads, a reader always gets the newest complete
tensor.
"""

from asyncddp.windows.manager import WindowManager, windows_of
from asyncddp.windows.receive_buffers import Staleness
from asyncddp.windows.window import Window

__all__ = ["Staleness", "Window", "WindowManager", "windows_of"]
