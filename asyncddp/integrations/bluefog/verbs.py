"""BlueFog's communication operations: collectives, neighbour averages and object broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from asyncddp.context import current
from asyncddp.engine import Handle
from asyncddp.integrations.bluefog.error_translation import IntegerAverageError, translate_errors_of
from asyncddp.integrations.bluefog.verb_variants import (
    Options,
    blocking,
    in_place,
    nonblocking,
    unless_suspended,
)
from asyncddp.ops import allgather as _gather
from asyncddp.ops import allreduce as _reduce
from asyncddp.ops import barrier as _barrier
from asyncddp.ops import broadcast as _cast
from asyncddp.ops import hierarchical_neighbor_allreduce as _hierarchical
from asyncddp.ops import neighbor_allgather as _neighbor_gather
from asyncddp.ops import neighbor_allreduce as _neighbor_reduce
from asyncddp.ops import object_collectives as _objects
from asyncddp.ops import pair_gossip as _pair
from asyncddp.optim import parameter_sync as _parameters
from asyncddp.optim import state_broadcast as _state

__all__ = [
    "allgather", "allgather_nonblocking", "allreduce", "allreduce_", "allreduce_nonblocking",
    "allreduce_nonblocking_", "allreduce_parameters", "barrier", "broadcast", "broadcast_",
    "broadcast_nonblocking", "broadcast_nonblocking_", "broadcast_object", "broadcast_object_list",
    "broadcast_optimizer_state", "broadcast_parameters", "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_nonblocking", "neighbor_allgather",
    "neighbor_allgather_nonblocking", "neighbor_allreduce", "neighbor_allreduce_nonblocking",
    "pair_gossip", "pair_gossip_nonblocking",
]  # fmt: skip

Weights = Mapping[int, float]


def _run_allreduce(tensor: torch.Tensor, *, local: bool, **options: Any) -> torch.Tensor:
    return (_reduce.local_allreduce if local else _reduce.allreduce)(tensor, **options)


def _start_allreduce(tensor: torch.Tensor, *, local: bool, **options: Any) -> Handle[torch.Tensor]:
    start = _reduce.local_allreduce_nonblocking if local else _reduce.allreduce_nonblocking
    return start(tensor, **options)


@blocking(_run_allreduce, _start_allreduce)
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> Options:
    """Average or sum a tensor over all ranks; see :func:`asyncddp.allreduce`.

    With ``is_hierarchical_local`` only the ranks of this machine take part.
    """
    may_average = not isinstance(tensor, torch.Tensor) or tensor.is_floating_point()
    if average and not may_average and not tensor.is_complex():
        raise IntegerAverageError(
            f"allreduce: argument average: expected False for {tensor.dtype}, whose average is "
            "none; or cast the tensor to float first"
        )
    local = is_hierarchical_local
    return {"tensor": tensor, "average": average, "local": local, "name": name}


@blocking(_cast.broadcast, _cast.broadcast_nonblocking)
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Options:
    """Copy the root's tensor to all ranks, as a new tensor; see :func:`asyncddp.broadcast`."""
    return {"tensor": tensor, "root_rank": root_rank, "name": name}


@blocking(_gather.allgather, _gather.allgather_nonblocking)
def allgather(tensor: torch.Tensor, name: str | None = None) -> Options:
    """Concatenate all ranks' tensors along the first dimension; see :func:`asyncddp.allgather`."""
    return {"tensor": tensor, "name": name}


allreduce_ = in_place(allreduce)
allreduce_nonblocking = nonblocking(allreduce)
allreduce_nonblocking_ = nonblocking(allreduce_)
broadcast_ = in_place(broadcast)
broadcast_nonblocking = nonblocking(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)
allgather_nonblocking = nonblocking(allgather)


@unless_suspended
def barrier() -> None:
    """Wait until all ranks have called it; other operations continue.

    What was noted in a timeline before is in its file afterwards.
    """
    _barrier.barrier()
    tracer = current().tracer
    if tracer is not None:
        tracer.flush()


@unless_suspended
def broadcast_parameters(params: _parameters.Parameters, root_rank: int) -> None:
    """Copy the root's parameters to all ranks; see :func:`asyncddp.broadcast_parameters`."""
    _parameters.broadcast_parameters(params, root_rank)


allreduce_parameters = unless_suspended(_parameters.allreduce_parameters)


@unless_suspended
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Copy the root's optimizer state to all; see :func:`asyncddp.broadcast_optimizer_state`."""
    _state.broadcast_optimizer_state(optimizer, root_rank)


@unless_suspended
def broadcast_object(
    obj: Any, src: int = 0, device: torch.device | str | None = None, name: str | None = None
) -> Any:
    """Broadcast the Python object of ``src`` to all ranks, by pickle; ``device`` has no effect."""
    return _objects.broadcast_object(obj, src, name=name)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
) -> None:
    """Replace the objects of a list by the root's; None for ``src`` means rank 0."""
    if object_list:
        object_list[:] = broadcast_object(object_list, 0 if src is None else src, device, name)


@blocking(_neighbor_gather.neighbor_allgather, _neighbor_gather.neighbor_allgather_nonblocking)
def neighbor_allgather(
    tensor: torch.Tensor,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Options:
    """Concatenate the in-neighbours' tensors; see :func:`asyncddp.neighbor_allgather`.

    With ``enable_topo_check`` and ``dst_ranks`` the receivers must confirm that they expect it.
    """
    ranks = {"src_ranks": src_ranks, "dst_ranks": dst_ranks}
    check = enable_topo_check and dst_ranks is not None
    return {"tensor": tensor, **ranks, "check": check, "name": name}


_RENAMED = {"neighbor_weights": "src_weights", "send_neighbors": "dst_weights"}


@blocking(_neighbor_reduce.neighbor_allreduce, _neighbor_reduce.neighbor_allreduce_nonblocking)
def neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
    **renamed: object,
) -> Options:
    """Average a tensor with the neighbours' tensors; see :func:`asyncddp.neighbor_allreduce`.

    ``enable_topo_check`` does for ``dst_weights`` what it does in :func:`neighbor_allgather`.

    Raises:
        TypeError: An argument of an earlier version; the message says what it is called now.
    """
    for old in renamed:
        now = f"; it is called {_RENAMED[old]} now" if old in _RENAMED else ""
        raise TypeError(f"neighbor_allreduce got an unexpected keyword argument {old!r}{now}")
    weights = {"self_weight": self_weight, "src_weights": src_weights, "dst_weights": dst_weights}
    check = enable_topo_check and dst_weights is not None
    return {"tensor": tensor, **weights, "check": check, "name": name}


@blocking(
    _hierarchical.hierarchical_neighbor_allreduce,
    _hierarchical.hierarchical_neighbor_allreduce_nonblocking,
)
def hierarchical_neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Weights | None = None,
    dst_machine_weights: Weights | Iterable[int] | None = None,
    enable_topo_check: bool = False,
    name: str | None = None,
) -> Options:
    """Average within machines, then between neighbour machines, as asyncddp's operation does.

    With ``enable_topo_check`` the ranks compare their arguments before anything is sent.

    Raises:
        RuntimeError: Neither weights nor a machine topology are there.
    """
    weights = {
        "self_weight": self_weight,
        "src_machine_weights": src_machine_weights,
        "dst_machine_weights": dst_machine_weights,
    }
    unset = current().topologies.machine_given is None
    if unset and all(value is None for value in weights.values()):
        raise RuntimeError(
            "hierarchical_neighbor_allreduce: no machine topology is set; call "
            "bf.set_machine_topology(bf.ExponentialTwoGraph(bf.machine_size())) first, or give "
            "self_weight, src_machine_weights and dst_machine_weights"
        )
    return {"tensor": tensor, **weights, "check": enable_topo_check, "name": name}


@blocking(_pair.pair_gossip, _pair.pair_gossip_nonblocking)
def pair_gossip(
    tensor: torch.Tensor,
    target_rank: int,
    self_weight: float | None = None,
    pair_weight: float | None = None,
    name: str | None = None,
) -> Options:
    """Average with a partner, which must name this rank too; see :func:`asyncddp.pair_gossip`."""
    weights = {"self_weight": self_weight, "pair_weight": pair_weight}
    return {"tensor": tensor, "target_rank": target_rank, **weights, "name": name}


neighbor_allgather_nonblocking = nonblocking(neighbor_allgather)
neighbor_allreduce_nonblocking = nonblocking(neighbor_allreduce)
hierarchical_neighbor_allreduce_nonblocking = nonblocking(hierarchical_neighbor_allreduce)
pair_gossip_nonblocking = nonblocking(pair_gossip)


translate_errors_of(globals(), __all__)
