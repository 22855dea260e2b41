"""Backend ``asyncddp`` of ``torch.distributed``: process groups whose operations run on asyncddp.

::

    import torch.distributed as dist
    import asyncddp.integrations.torch_distributed  # registers the backend and mpi://

    dist.init_process_group("asyncddp", init_method="mpi://")

Importing it registers the backend for CPU and CUDA tensors and the rendezvous ``mpi://``, and lets
``env://`` work where only MPI's launcher has set variables. Every verb of a group is an operation
of the engine, in a context of its own beside that of the library's verbs:

====================================================  ==========================================
verb of the group                                     what runs
====================================================  ==========================================
allreduce, allreduce_coalesced                        the plan of ``asyncddp.allreduce``: slots of
                                                      shared memory, or the transport's sum; other
                                                      operators by an exchange of parts
reduce, broadcast, barrier                            the plans of the verbs of that name
reduce_scatter, _reduce_scatter_base, … _coalesced    the plan of ``asyncddp.reduce_scatter``; parts
                                                      of unequal length are exchanged
allgather, _allgather_base, … _coalesced              the plan of ``asyncddp.allgather``
gather, scatter, alltoall, alltoall_base              exchanges of messages
send, recv, recv_anysource                            messages that are matched by torch's tag
monitored_barrier                                     keys of torch's store
====================================================  ==========================================

Collectives of a group run in the order of their calls: a blocking one on the thread of the caller,
all others by the engine. Ranks that call different verbs, or with different shapes, raise a
MismatchError; a wait ends by the group's timeout, and names who is missing. Strided tensors pass
through contiguous memory of their device. Tensors on a GPU go by the transport that the ranks have
agreed on, in the order of torch's streams, as in the library's own verbs. Errors are raised by
``wait()``, ``value()`` and every later verb of the group.
"""

from __future__ import annotations

from asyncddp.integrations.torch_distributed.backend import BACKEND, register
from asyncddp.integrations.torch_distributed.monitored_barrier import monitored_barrier
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup

__all__ = ["BACKEND", "AsyncDDPProcessGroup", "monitored_barrier"]

register()
