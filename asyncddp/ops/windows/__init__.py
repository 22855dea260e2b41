r"""Operations on windows: tensors that neighbours write and read one-sided, without waiting.

Every rank of a window holds its own tensor x and, for each in-neighbour j, a *buffer* :math:`b_j`:
what j has put there. ``win_put`` and ``win_accumulate`` write into the neighbours' buffers,
``win_get`` reads a neighbour's tensor into one's own buffer, ``win_update`` mixes the buffers into
one's own tensor. Only ``win_create`` and ``win_free`` are collective. Buffers lie in the memory of
the host, wherever the tensors do.

A put completes while its target computes, or sleeps. A reader sees each neighbour's tensor whole,
of one version; a writer never waits for a reader. What is accumulated and collected counts exactly
once, so that sums over ranks are conserved.
"""

from __future__ import annotations

from asyncddp.ops.windows.completion import (
    win_cancel,
    win_flush,
    win_poll,
    win_wait,
)
from asyncddp.ops.windows.creation import (
    create_along,
    get_current_created_window_names,
    win_create,
    win_free,
)
from asyncddp.ops.windows.get_and_update import (
    win_get,
    win_get_nonblocking,
    win_read_neighbor,
    win_update,
    win_update_then_collect,
)
from asyncddp.ops.windows.inspection import (
    get_win_version,
    turn_off_win_ops_with_associated_p,
    turn_on_win_ops_with_associated_p,
    win_associated_p,
    win_staleness,
)
from asyncddp.ops.windows.locking import (
    win_mutex,
)
from asyncddp.ops.windows.put_and_accumulate import (
    win_accumulate,
    win_accumulate_nonblocking,
    win_put,
    win_put_nonblocking,
)

__all__ = [
    "create_along",
    "get_current_created_window_names",
    "get_win_version",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_associated_p",
    "win_cancel",
    "win_create",
    "win_flush",
    "win_free",
    "win_get",
    "win_get_nonblocking",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_nonblocking",
    "win_read_neighbor",
    "win_staleness",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]
