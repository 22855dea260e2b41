"""BlueFog's communication operations among neighbours, such as ``neighbor_allreduce``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from asyncddp.context import current
from asyncddp.integrations.bluefog.verb_variants import Options, blocking, nonblocking
from asyncddp.ops import hierarchical_neighbor_allreduce as _hierarchical
from asyncddp.ops import neighbor_allgather as _allgather
from asyncddp.ops import neighbor_allreduce as _allreduce
from asyncddp.ops import pair_gossip as _pair

__all__ = [
    "hierarchical_neighbor_allreduce", "hierarchical_neighbor_allreduce_nonblocking",
    "neighbor_allgather", "neighbor_allgather_nonblocking", "neighbor_allreduce",
    "neighbor_allreduce_nonblocking", "pair_gossip", "pair_gossip_nonblocking",
]  # fmt: skip

Weights = Mapping[int, float]


@blocking(_allgather.neighbor_allgather, _allgather.neighbor_allgather_nonblocking)
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


@blocking(_allreduce.neighbor_allreduce, _allreduce.neighbor_allreduce_nonblocking)
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
    """Average with a partner, who must name this rank in turn; see :func:`asyncddp.pair_gossip`."""
    weights = {"self_weight": self_weight, "pair_weight": pair_weight}
    return {"tensor": tensor, "target_rank": target_rank, **weights, "name": name}


neighbor_allgather_nonblocking = nonblocking(neighbor_allgather)
neighbor_allreduce_nonblocking = nonblocking(neighbor_allreduce)
hierarchical_neighbor_allreduce_nonblocking = nonblocking(hierarchical_neighbor_allreduce)
pair_gossip_nonblocking = nonblocking(pair_gossip)
