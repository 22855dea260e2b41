"""Synchronisation of parameters across ranks: broadcast from a root, or average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from asyncddp.algorithms.gradient_hooks import wait_for_reads
from asyncddp.context import current
from asyncddp.context.context import use
from asyncddp.context.mesh_context import replica_context
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce_nonblocking_
from asyncddp.ops.allreduce_tensors import broadcast_tensors
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.tensors.local_parts import reshard, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parameters: TypeAlias = (
    torch.nn.Module
    | Mapping[str, torch.Tensor]
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
)


def broadcast_parameters(
    params: Parameters, root_rank: int = 0, *, mesh: DeviceMesh | None = None
) -> None:
    r"""Copy the root's parameters to all ranks, in place.

    .. math:: x_i \leftarrow x_\mathrm{root}

    Args:
        params: A module (its parameters and buffers), a ``state_dict()``, a list of tensors, or
            names with tensors such as ``model.named_parameters()``. Ranks match by name, in
            whatever order they list them; tensors without names match by their place.
        root_rank: The root.
        mesh: Where parameters are sharded: the dimension of the mesh whose ranks are replicas, of
            which the root is one.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor, or no such root.
        MismatchError: Ranks differ in names, shapes or dtypes; raised on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> def start():
        ...     weight = torch.full((2,), float(bf.rank()))
        ...     bf.broadcast_parameters({"weight": weight}, root_rank=1)
        ...     return weight.tolist()
        >>> with bf.local_world(2) as world:
        ...     world.run(start)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    with use(replica_context(mesh)):
        named = _named("broadcast_parameters", params)
        require_equal_tensors(current(), "broadcast_parameters", named)
        tensors = list(named.values())
        wait_for_reads(tensors)
        broadcast_tensors(tensors, root_rank)


def allreduce_parameters(params: Parameters, *, round_integers: bool = False) -> None:
    r"""Replace parameters by their averages over all ranks, in place.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_j x_j

    Args:
        params: As for :func:`broadcast_parameters`.
        round_integers: Average integers too, rounded half to even; they stay as they are otherwise,
            and bools always do.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Something that is no tensor.
        MismatchError: Ranks differ in names, shapes or dtypes; raised on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> def mean():
        ...     weight = torch.full((2,), float(bf.rank()))
        ...     bf.allreduce_parameters([weight])
        ...     return weight.tolist()
        >>> with bf.local_world(2) as world:
        ...     world.run(mean)
        [[0.5, 0.5], [0.5, 0.5]]
    """
    named = _named("allreduce_parameters", params)
    require_equal_tensors(current(), "allreduce_parameters", named)
    tensors = [one for one in named.values() if one.is_floating_point() or one.is_complex()]
    if round_integers:
        tensors = [one for one in named.values() if one.dtype != torch.bool]
    wait_for_reads(tensors)
    parts = [shard(one).detach() for one in tensors]
    for handle in [allreduce_nonblocking_(t, round_integers=round_integers) for t in parts]:
        handle.wait()


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As what a tensor of a dtype that cannot travel is sent, by bytes of an element."""
_replicas: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensors that a checkpoint gave each rank as its own, and their versions then."""


def keep_replica(model: torch.nn.Module) -> None:
    """Exempt the model's tensors from wrappers' initial broadcast, until they change."""
    for tensor in tensors_of(model).values():
        if _can_travel(tensor):
            _replicas[tensor] = tensor._version


def starting_tensors(
    models: Sequence[torch.nn.Module], parameters: Iterable[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return, by name, the tensors that a new wrapper broadcasts from rank 0.

    These are the parameters (None: all parameters of the models) and the models' dense buffers,
    except for tensors that a checkpoint has just loaded as each rank's own.
    """
    chosen = None if parameters is None else set(map(id, parameters))
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for number, model in enumerate(models):
        for name, one in tensors_of(model).items():
            trained = chosen is None or id(one) in chosen
            if (trained or not isinstance(one, torch.nn.Parameter)) and _can_travel(one):
                found.setdefault(id(one), (f"{number}.{name}" if len(models) > 1 else name, one))
    return {name: one for name, one in found.values() if not _is_own_replica(one)}


def _is_own_replica(tensor: torch.Tensor) -> bool:
    return tensor in _replicas and bool(_replicas[tensor] == tensor._version)


def _can_travel(tensor: torch.Tensor) -> bool:
    special = is_lazy(tensor) or tensor.is_meta or tensor.is_quantized or tensor.is_nested
    return not special and not tensor.is_inference() and tensor.layout == torch.strided


def broadcast_start(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast rank 0's tensors, whatever their dtypes and strides; collective."""
    every = list(tensors)
    if every:
        wait_for_reads(every)
        broadcast_tensors([_sent(shard(one).detach()) for one in every])


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor without expanded dimensions, which can be sent and written."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor if tensor.dtype in DTYPES else tensor.view(_BITS[tensor.itemsize])


def _named(caller: str, params: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by name, without duplicates, in the same order on all ranks."""
    if isinstance(params, torch.nn.Module):
        reshard([params])
        return tensors_of(params)
    entries = params.items() if isinstance(params, Mapping) else params
    if not isinstance(entries, Iterable) or isinstance(entries, torch.Tensor):
        raise ArgumentError(
            f"{caller}: argument params: expected a module, a state_dict, tensors or (name, "
            f"tensor) pairs, got {type(params).__name__}"
        )
    named: dict[str, torch.Tensor] = {}
    unnamed: dict[str, torch.Tensor] = {}
    for index, entry in enumerate(entries):
        pair = isinstance(entry, tuple) and len(entry) == 2
        name, tensor = entry if pair else (f"tensor {index}", entry)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"{caller}: argument params: expected a tensor as entry {name if pair else index}, "
                f"got {type(tensor).__name__}"
            )
        if named.get(name, tensor) is not tensor:
            raise ArgumentError(
                f"{caller}: argument params: two tensors have the name {name}; give each its own"
            )
        (named if pair else unnamed)[name] = tensor
    once: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*sorted(named.items(), key=lambda one: str(one[0])), *unnamed.items()):
        once.setdefault(id(tensor), (str(name), tensor))
    return dict(once.values())
