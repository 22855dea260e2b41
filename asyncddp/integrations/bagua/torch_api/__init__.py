"""Bagua's ``bagua.torch_api``."""

from asyncddp.integrations.bagua.torch_api import algorithms, checkpoint, contrib
from asyncddp.integrations.bagua.torch_api.communication import init_process_group, is_initialized
from asyncddp.integrations.bagua.torch_api.env import (
    get_local_rank,
    get_local_size,
    get_node_rank,
    get_rank,
    get_world_size,
)

__all__ = [
    "algorithms",
    "checkpoint",
    "contrib",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
]
