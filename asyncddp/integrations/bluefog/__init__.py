"""BlueFog's API on asyncddp: a BlueFog script runs after changing its two import lines.

::

    import asyncddp.integrations.bluefog as bf  # was: import bluefog.torch as bf
    from asyncddp.integrations.bluefog import topology_util  # was: from bluefog.common import …

Names, arguments, defaults and results are BlueFog's; the verbs are asyncddp's own. What differs,
since BlueFog is wrong there or does without:

- Neighbours are matched by rank: ``src_weights`` may name some of them, the others count 0.
  Results are never the input's own memory. Weights stay float64. A root that ranks disagree about
  raises.
- Nothing is negotiated. ``set_skip_negotiate_stage`` sets a flag that means nothing;
  ``pair_gossip`` works whatever it is. What ranks do not agree about raises an exception that
  names them, which is a ``ValueError`` as in BlueFog. With ``enable_topo_check`` those ranks raise
  whom it concerns.
- Any number of puts may be under way in one window; a put completes while its target computes, and
  is read whole. ``get_win_version`` counts what was accumulated too. ``win_get`` gives what was
  published: in ``win_create``, in puts of the window's own tensor, in ``win_update``.
- ``win_mutex(for_self=True)`` holds off in-neighbours, and may be taken twice by one thread. Its
  ``ranks`` are neighbours: others have no buffer to hold.
- ``set_topology`` with an equal graph and another ``is_weighted`` is not ignored. The matrix of
  ``Infer…`` has columns that sum to 1. Graphs may have their nodes in any order.
- Optimizers take over the state of what they wrap, and work with any ``torch.optim`` optimizer,
  closures, frozen, unused and shared parameters, leaf models, accumulation and GradScaler.
  Gradients are averaged when ``backward()`` returns: ``synchronize()`` and ``skip_synchronize()``
  need not be called. ``DistributedPushSumOptimizer`` and ``DistributedPullGetOptimizer`` work, and
  are exported.
- ``DistributedWinPutOptimizer`` and ``DistributedPullGetOptimizer`` wait for neighbours that have
  made fewer averagings. Over there a put waits until its target is in MPI, which keeps ranks near
  each other; here nothing does, and the learning rates of BlueFog's scripts want it.
  ``asyncddp.DistributedWinPutOptimizer`` waits for nobody.
- ``broadcast_optimizer_state`` sends options and numbers exactly, and makes no step;
  ``allreduce_parameters`` leaves integers as they are.
- Tensors may be non-contiguous, 0-dim, bfloat16 or complex; lists may be generators.
- ``init()`` may follow ``shutdown()``. A wait that is too long raises, after ``ASYNCDDP_TIMEOUT``.
"""

from __future__ import annotations

from asyncddp.integrations.bluefog import topology_util
from asyncddp.integrations.bluefog.basics import (
    get_skip_negotiate_stage,
    init,
    is_available,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    machine_rank,
    machine_size,
    mpi_threads_supported,
    nccl_built,
    rank,
    resume,
    set_skip_negotiate_stage,
    shutdown,
    size,
    suspend,
    unified_mpi_window_model_supported,
)
from asyncddp.integrations.bluefog.collective_verbs import (
    allgather,
    allgather_nonblocking,
    allreduce,
    allreduce_,
    allreduce_nonblocking,
    allreduce_nonblocking_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_nonblocking,
    broadcast_nonblocking_,
)
from asyncddp.integrations.bluefog.neighbor_verbs import (
    hierarchical_neighbor_allreduce,
    hierarchical_neighbor_allreduce_nonblocking,
    neighbor_allgather,
    neighbor_allgather_nonblocking,
    neighbor_allreduce,
    neighbor_allreduce_nonblocking,
    pair_gossip,
    pair_gossip_nonblocking,
)
from asyncddp.integrations.bluefog.optimizer_functions import (
    DistributedAdaptThenCombineOptimizer,
    DistributedAdaptWithCombineOptimizer,
    DistributedAllreduceOptimizer,
    DistributedBluefogOptimizer,
    DistributedGradientAllreduceOptimizer,
    DistributedHierarchicalNeighborAllreduceOptimizer,
    DistributedNeighborAllreduceOptimizer,
    DistributedPullGetOptimizer,
    DistributedPushSumOptimizer,
    DistributedWinPutOptimizer,
)
from asyncddp.integrations.bluefog.optimizers import CommunicationType
from asyncddp.integrations.bluefog.parameter_broadcast import (
    allreduce_parameters,
    broadcast_object,
    broadcast_object_list,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from asyncddp.integrations.bluefog.timeline_functions import (
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)
from asyncddp.integrations.bluefog.topology_settings import (
    in_neighbor_machine_ranks,
    in_neighbor_ranks,
    is_machine_topo_weighted,
    is_topo_weighted,
    load_machine_topology,
    load_topology,
    out_neighbor_machine_ranks,
    out_neighbor_ranks,
    set_machine_topology,
    set_topology,
)
from asyncddp.integrations.bluefog.topology_util import (
    ExponentialGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetDynamicOnePeerSendRecvRanks,
    GetExp2DynamicSendRecvMachineRanks,
    GetInnerOuterExpo2DynamicSendRecvRanks,
    GetInnerOuterRingDynamicSendRecvRanks,
    GetRecvWeights,
    GetSendWeights,
    InferDestinationFromSourceRanks,
    InferSourceFromDestinationRanks,
    IsRegularGraph,
    IsTopologyEquivalent,
    MeshGrid2DGraph,
    RingGraph,
    StarGraph,
    SymmetricExponentialGraph,
    isPowerOf,
)
from asyncddp.integrations.bluefog.verb_variants import poll, synchronize, wait
from asyncddp.integrations.bluefog.window_verbs import (
    get_current_created_window_names,
    get_win_version,
    neighbor_win_accumulate,
    neighbor_win_accumulate_nonblocking,
    neighbor_win_get,
    neighbor_win_get_nonblocking,
    neighbor_win_put,
    neighbor_win_put_nonblocking,
    turn_off_win_ops_with_associated_p,
    turn_on_win_ops_with_associated_p,
    win_accumulate,
    win_accumulate_nonblocking,
    win_associated_p,
    win_cancel,
    win_create,
    win_free,
    win_get,
    win_get_nonblocking,
    win_lock,
    win_mutex,
    win_poll,
    win_put,
    win_put_nonblocking,
    win_read_neighbor,
    win_update,
    win_update_then_collect,
    win_wait,
)

__all__ = [
    "CommunicationType",
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedAllreduceOptimizer",
    "DistributedBluefogOptimizer",
    "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer",
    "DistributedPushSumOptimizer",
    "DistributedWinPutOptimizer",
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights",
    "GetSendWeights",
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    "IsRegularGraph",
    "IsTopologyEquivalent",
    "MeshGrid2DGraph",
    "RingGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "allreduce_parameters",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_nonblocking",
    "broadcast_nonblocking_",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "get_current_created_window_names",
    "get_skip_negotiate_stage",
    "get_win_version",
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_nonblocking",
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "init",
    "isPowerOf",
    "is_available",
    "is_homogeneous",
    "is_initialized",
    "is_machine_topo_weighted",
    "is_topo_weighted",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "mpi_threads_supported",
    "nccl_built",
    "neighbor_allgather",
    "neighbor_allgather_nonblocking",
    "neighbor_allreduce",
    "neighbor_allreduce_nonblocking",
    "neighbor_win_accumulate",
    "neighbor_win_accumulate_nonblocking",
    "neighbor_win_get",
    "neighbor_win_get_nonblocking",
    "neighbor_win_put",
    "neighbor_win_put_nonblocking",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "pair_gossip",
    "pair_gossip_nonblocking",
    "poll",
    "rank",
    "resume",
    "set_machine_topology",
    "set_skip_negotiate_stage",
    "set_topology",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
    "topology_util",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "unified_mpi_window_model_supported",
    "wait",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_associated_p",
    "win_cancel",
    "win_create",
    "win_free",
    "win_get",
    "win_get_nonblocking",
    "win_lock",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_nonblocking",
    "win_read_neighbor",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]
