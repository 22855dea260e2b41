"""``asyncddp`` backend of torch.distributed: its registration, and its process groups' creation."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from asyncddp.environments.launchers import set_torch_variables
from asyncddp.integrations.torch_distributed.mixed_process_group import (
    MixedProcessGroup,
    create_other_groups,
    other_backends,
)
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup
from asyncddp.integrations.torch_distributed.rendezvous import register_rendezvous
from asyncddp.integrations.torch_distributed.store_meeting import meet_in_store
from asyncddp.integrations.torch_distributed.world import TorchWorld

BACKEND = "asyncddp"
"""Name of the backend for ``init_process_group`` and ``new_group``."""


def register() -> None:
    """Register the backend and ``mpi://``; set torch's variables from those of MPI's launcher."""
    if BACKEND.upper() in dist.Backend._plugins:
        return
    set_torch_variables()
    register_rendezvous()
    dist.Backend.register_backend(
        BACKEND, create_process_group, extended_api=True, devices=["cpu", "cuda"]
    )


def create_process_group(options: Any, backend_options: Any = None) -> AsyncDDPProcessGroup:
    """Create a process group for torch; collective over its members.

    Args:
        options: Torch's ``_DistributedBackendOptions``: store, rank, size, timeout and members.
        backend_options: The user's ``pg_options``, for the other backends of a group.

    Returns:
        The process group.

    Raises:
        ArgumentError: This backend is asked for on a device that it does not serve, torch does
            not have another one that is asked for beside it, or the first group of this backend is
            one of some ranks.
        EnvironmentProblem: Torch's world is another one than MPI's.
        WaitTimeoutError: A member has not come by the group's timeout.
    """
    # torch's creation of the group, our caller, knows alone which backends serve other devices
    others = other_backends(sys._getframe(1).f_locals.get("backend_config"), BACKEND)
    members = list(options.global_ranks_in_group)
    if members:
        TorchWorld.require_default_group(len(members))
    ranks = members or range(options.group_size)
    rank, timeout = options.group_rank, options.timeout.total_seconds()
    title = f"process group {options.group_id!r}" if members else "the default process group"
    meet_in_store(options.store, f"creating {title}", ranks, rank, timeout)
    groups = create_other_groups(others, options, backend_options)
    world, on_gpus = TorchWorld.open(timeout), "cuda" not in others
    if members:
        group = world.part(members, rank, options.group_id, on_gpus=on_gpus)
    else:
        group = world.default_group(rank, options.group_size, on_gpus=on_gpus)
    if groups:
        return MixedProcessGroup(group, options.store, timeout, title, groups)
    return AsyncDDPProcessGroup(group, options.store, timeout, title)
