"""Process groups that delegate the tensors of some devices to other backends of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from asyncddp.errors import ArgumentError
from asyncddp.integrations.torch_distributed.arguments import DEVICES
from asyncddp.integrations.torch_distributed.process_group import AsyncDDPProcessGroup
from asyncddp.ops.process_group import ProcessGroup

_VERBS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "_start_coalescing",
    "_end_coalescing",
)
"""Verbs that go to the backend of the device of their first tensor."""


def _on_its_device(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(AsyncDDPProcessGroup, name)

    @functools.wraps(own)
    def verb(self: MixedProcessGroup, *arguments: Any, **options: Any) -> Any:
        device = _first_device(arguments) or _first_device(options.values())
        other = None if device is None else self.others.get(device.type)
        if other is None:
            return own(self, *arguments, **options)
        return getattr(other, name)(*arguments, **options)

    return verb


def _first_device(values: Iterable[Any]) -> torch.device | None:
    """Return the device of the first tensor in arguments and nested lists."""
    for value in values:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, list | tuple) and (found := _first_device(value)) is not None:
            return found
    return None


class MixedProcessGroup(AsyncDDPProcessGroup):
    """Process group that delegates the tensors of some devices to groups of other backends.

    Made by ``init_process_group("cpu:asyncddp,cuda:nccl")``: torch itself would let a group in
    Python stand for all devices, and drop the other backends. A barrier is this library's.

    Args:
        group: As in :class:`ProcessGroupBase`, like the next three arguments.
        store: The group's part of torch's store.
        timeout: Seconds after which a verb raises.
        title: The group's name for messages.
        others: Groups of other backends, by device type.
    """

    def __init__(
        self,
        group: ProcessGroup,
        store: Store,
        timeout: float,
        title: str,
        others: Mapping[str, dist.ProcessGroup],
    ) -> None:
        super().__init__(group, store, timeout, title)
        self.others = others

    def _get_backend(self, device: torch.device) -> Any:
        other = self.others.get(device.type)
        return self if other is None else other._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        own = [device for device in super()._device_types if device.type not in self.others]
        return [*own, *map(torch.device, self.others)]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later verbs of all backends."""
        super().set_timeout(timeout)
        for device, other in self.others.items():
            other._get_backend(torch.device(device))._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the groups of the other backends, and this one; may be called again."""
        for other in dict.fromkeys(self.others.values()):
            if other in distributed_c10d._world.pg_map:
                dist.destroy_process_group(other)
        super().shutdown()


for _name in _VERBS:
    if hasattr(AsyncDDPProcessGroup, _name):
        setattr(MixedProcessGroup, _name, _on_its_device(_name))


def other_backends(config: Any, backend: str) -> dict[str, str]:
    """Return the other backends by device, from torch's configuration of a group.

    Raises:
        ArgumentError: This library is to serve a device that it does not, or torch does not have
            another backend that is asked for.
    """
    named: dict[str, str] = {} if config is None else config.get_device_backend_map()
    for device in [device for device, name in named.items() if name == backend]:
        if device not in DEVICES:
            raise ArgumentError(
                f"init_process_group: argument backend: got {device}:{backend}, expected "
                f"{backend} for {' or '.join(DEVICES)}, which it serves"
            )
    others = {device: name for device, name in named.items() if name != backend}
    for device, name in others.items():
        if not _is_available(name):
            there = [one for one in dist.Backend.backend_list if _is_available(one)]
            raise ArgumentError(
                f"init_process_group: argument backend: got {device}:{name}, but this torch has no "
                f"such backend; expected one of {', '.join(there)}"
            )
    return others


def _is_available(name: str) -> bool:
    if name not in dist.Backend.backend_list or name == dist.Backend.UNDEFINED:
        return False
    return bool(getattr(dist, f"is_{name}_available", lambda: True)())


def create_other_groups(
    others: Mapping[str, str], options: Any, backend_options: Any
) -> dict[str, dist.ProcessGroup]:
    """Create torch's groups of other backends with the same ranks; collective over these ranks.

    Args:
        others: Backends by device type.
        options: Torch's ``_DistributedBackendOptions`` of the whole group.
        backend_options: What the user passed as ``pg_options``.

    Returns:
        The groups by device type, one for each backend.
    """
    groups = {}
    for name in dict.fromkeys(others.values()):
        devices = [device for device, used in others.items() if used == name]
        config = ",".join(f"{device}:{name}" for device in devices)
        group = _create_group(name, config, options, backend_options)
        groups.update(dict.fromkeys(devices, group))
    return groups


def _create_group(name: str, config: str, options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Create a torch group with a tag that hides it from searches for groups of these ranks."""
    title = f"{options.group_id}:{name}"
    members = list(options.global_ranks_in_group)
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        options.group_size,
        options.group_rank,
        members,
        dist.Backend(config),
        PrefixStore(name, options.store),
        cast("Any", title),
        backend_options=backend_options,
        timeout=options.timeout,
        pg_tag=f"asyncddp: {title}",
    )
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(dist.Backend.backend_type_map.get(name, custom))
    places = {rank: place for place, rank in enumerate(members or range(options.group_size))}
    distributed_c10d._world.pg_group_ranks[group] = places
    return group
