"""Registration of the backend and its rendezvous, and the creation of process groups."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from asyncddp.errors import ArgumentError
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup
from asyncddp.integrations.torch_distributed.rendezvous import register_rendezvous
from asyncddp.integrations.torch_distributed.store_meeting import meet_in_store
from asyncddp.integrations.torch_distributed.world import TorchWorld
from asyncddp.launch.rank import set_torch_variables

BACKEND = "asyncddp"
"""Name of the backend for ``init_process_group`` and ``new_group``."""


def register() -> None:
    """Register the backend and ``mpi://``, and set the variables of MPI's launcher for torch."""
    if BACKEND.upper() in dist.Backend._plugins:
        return
    set_torch_variables(os.environ)
    register_rendezvous()
    dist.Backend.register_backend(
        BACKEND, create_process_group, extended_api=True, devices=["cpu", "cuda"]
    )


def create_process_group(options: Any, _: Any = None) -> AsyncDDPProcessGroup:
    """Create a group for torch; collective over its members.

    Args:
        options: Torch's ``_DistributedBackendOptions``: store, rank, size, timeout and members.

    Returns:
        The process group.

    Raises:
        ArgumentError: Another backend is asked for as well, as in ``"cpu:asyncddp,cuda:nccl"``, or
            the first group of this backend is one of some ranks.
        EnvironmentProblem: Torch's world is another one than MPI's.
        WaitTimeoutError: A member has not come by the group's timeout.
    """
    _refuse_mixtures(sys._getframe(1).f_locals.get("backend_config"))
    members = list(options.global_ranks_in_group)
    if members:
        TorchWorld.require_default_group(len(members))
    ranks = members or range(options.group_size)
    rank, timeout = options.group_rank, options.timeout.total_seconds()
    title = f"process group {options.group_id!r}" if members else "the default process group"
    meet_in_store(options.store, f"creating {title}", ranks, rank, timeout)
    world = TorchWorld.open(timeout)
    if members:
        transport = world.part(members, rank, options.group_id)
    else:
        transport = world.default_group(rank, options.group_size)
    return AsyncDDPProcessGroup(transport, options.store, ranks, timeout, title)


def _refuse_mixtures(config: Any) -> None:
    """Raise an ArgumentError where torch's configuration names another backend for some device.

    Torch would drop the other one without a word, since a group in Python stands for all devices.
    """
    named = {} if config is None else config.get_device_backend_map()
    others = {device: name for device, name in named.items() if name != BACKEND}
    if others:
        device, name = next(iter(others.items()))
        raise ArgumentError(
            f"init_process_group: argument backend: got {name} for {device} beside {BACKEND}; "
            f"expected one backend for a group: make one of each, the second by "
            f"torch.distributed.new_group(backend={name!r})"
        )
