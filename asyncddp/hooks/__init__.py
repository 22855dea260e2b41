"""Communication hooks for torch's DistributedDataParallel, over its own process group.

Here belong the hooks and their state. Users register them with torch, which calls them in the
backward pass. They use the process group of the model alone, and need no ``init()`` of this
library.
"""

from asyncddp.hooks.bytegrad_hook import ByteGradState, bytegrad_hook
from asyncddp.hooks.compressed_allreduce_hook import (
    CompressedAllreduceState,
    compressed_allreduce_hook,
    error_feedback,
)
from asyncddp.hooks.gossip_parameters_hook import GossipParametersState, gossip_parameters_hook
from asyncddp.hooks.hook_state import HookState
from asyncddp.hooks.neighbor_allreduce_hook import NeighborAllreduceState, neighbor_allreduce_hook

__all__ = [
    "ByteGradState",
    "CompressedAllreduceState",
    "GossipParametersState",
    "HookState",
    "NeighborAllreduceState",
    "bytegrad_hook",
    "compressed_allreduce_hook",
    "error_feedback",
    "gossip_parameters_hook",
    "neighbor_allreduce_hook",
]
