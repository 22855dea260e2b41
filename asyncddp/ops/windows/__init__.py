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

from asyncddp.ops.windows.completion import win_cancel as win_cancel
from asyncddp.ops.windows.completion import win_flush as win_flush
from asyncddp.ops.windows.completion import win_poll as win_poll
from asyncddp.ops.windows.completion import win_wait as win_wait
from asyncddp.ops.windows.creation import create_along as create_along
from asyncddp.ops.windows.creation import (
    get_current_created_window_names as get_current_created_window_names,
)
from asyncddp.ops.windows.creation import win_create as win_create
from asyncddp.ops.windows.creation import win_free as win_free
from asyncddp.ops.windows.get_and_update import win_get as win_get
from asyncddp.ops.windows.get_and_update import win_get_nonblocking as win_get_nonblocking
from asyncddp.ops.windows.get_and_update import win_read_neighbor as win_read_neighbor
from asyncddp.ops.windows.get_and_update import win_update as win_update
from asyncddp.ops.windows.get_and_update import win_update_then_collect as win_update_then_collect
from asyncddp.ops.windows.inspection import get_win_version as get_win_version
from asyncddp.ops.windows.inspection import win_associated_p as win_associated_p
from asyncddp.ops.windows.inspection import win_staleness as win_staleness
from asyncddp.ops.windows.locking import win_mutex as win_mutex
from asyncddp.ops.windows.put_and_accumulate import win_accumulate as win_accumulate
from asyncddp.ops.windows.put_and_accumulate import (
    win_accumulate_nonblocking as win_accumulate_nonblocking,
)
from asyncddp.ops.windows.put_and_accumulate import win_put as win_put
from asyncddp.ops.windows.put_and_accumulate import win_put_nonblocking as win_put_nonblocking
