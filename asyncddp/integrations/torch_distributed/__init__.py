"""Backend ``asyncddp`` of ``torch.distributed``: all of PyTorch's ecosystem over MPI.

::

    import torch.distributed as dist
    import asyncddp.integrations.torch_distributed  # registers the backend and mpi://

    dist.init_process_group("asyncddp", init_method="mpi://")

Importing it registers the backend for CPU and CUDA tensors and the rendezvous ``mpi://``, and lets
``env://`` work where only MPI's launcher has set variables. What torch's verbs become, on a
transport of the group's own, apart from that of the library's verbs:

====================================================  ==========================================
verb of the group                                     what runs
====================================================  ==========================================
allreduce, allreduce_coalesced                        allreduce of the transport for sums and
                                                      averages: MPI's, or through shared memory;
                                                      else parts are exchanged, reduced, gathered
reduce                                                messages: parts are exchanged, reduced, and
                                                      gathered by the root
reduce_scatter, _reduce_scatter_base, … _coalesced    reduce-scatter of the transport for equal
                                                      parts and sums; else parts are exchanged
broadcast                                             broadcast of the transport
allgather, _allgather_base, … _coalesced              allgather of the transport, or an exchange
gather, scatter, alltoall, alltoall_base              messages point to point
send, recv, recv_anysource                            messages, with torch's tags
barrier                                               barrier of the transport
monitored_barrier                                     keys of torch's store
====================================================  ==========================================

Collectives of a group run in the order of their calls: a blocking one on the thread of the caller
where nothing is under way, all others on the group's own thread. Strided tensors pass through
contiguous memory of their device. Tensors on a GPU go by the group's device transport in the order
of torch's streams, as in the library's own verbs, and ``send`` and ``recv`` are staged. Errors are
raised by ``wait()``, ``value()`` and every later verb of the group.
"""

from __future__ import annotations

from asyncddp.integrations.torch_distributed.backend import BACKEND, register
from asyncddp.integrations.torch_distributed.monitored_barrier import monitored_barrier
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup

__all__ = ["BACKEND", "AsyncDDPProcessGroup", "monitored_barrier"]

register()
