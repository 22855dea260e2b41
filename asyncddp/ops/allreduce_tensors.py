"""Average or broadcast of many tensors, or of a module's parameters, in pieces of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asyncddp.engine import Handle
from asyncddp.ops.allreduce import allreduce_nonblocking_
from asyncddp.ops.broadcast import broadcast_nonblocking_
from asyncddp.ops.process_group import ProcessGroup
from asyncddp.ops.settings_agreement import tensors_of
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import partition
from asyncddp.tensors.local_parts import reshard, shard

AVERAGED_BYTES = 32 << 20
"""Most bytes of tensors that are averaged at a time."""
_UNDER_WAY = 2  # pieces at a time


def average_tensors(
    tensors: Sequence[torch.Tensor],
    average: Callable[[list[torch.Tensor]], Handle[Any]] = allreduce_nonblocking_,
) -> None:
    r"""Replace tensors by their averages over ranks; collective.

    The tensors are dense floats, equal on all ranks in number, shapes and dtypes. They are written
    through their ``data``, which autograd does not record. ``average`` starts the in-place average
    of a list of tensors.
    """
    _in_pieces([shard(tensor).data for tensor in tensors], average)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], root_rank: int = 0, group: ProcessGroup | None = None
) -> None:
    """Overwrite tensors with the root's, on all ranks or those of a group; collective.

    The tensors are equal on all ranks in number, shapes and dtypes.
    """
    start = partial(broadcast_nonblocking_, root_rank=root_rank, group=group)
    _in_pieces([shard(tensor).detach() for tensor in tensors], start)


def _in_pieces(
    tensors: Sequence[torch.Tensor], start: Callable[[list[torch.Tensor]], Handle[Any]]
) -> None:
    """Run a non-blocking operation on all tensors, list by list, and wait for the results."""
    tensors = [tensor for tensor in tensors if tensor.numel()]  # a shard may be empty
    under_way: deque[Handle[Any]] = deque()
    for indices in partition(tensors, AVERAGED_BYTES):
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
        under_way.append(start([tensors[index] for index in indices]))
    for handle in under_way:
        handle.wait()


def dense_floats(model: torch.nn.Module, *, buffers: bool) -> list[torch.Tensor]:
    """Return a module's dense floating-point parameters, and optionally buffers, sorted by name."""
    return [
        tensor
        for tensor in tensors_of(model, buffers=buffers).values()
        if tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex())
    ]


def average_module(model: torch.nn.Module, *, buffers: bool, parameters: bool = True) -> None:
    r"""Replace a module's dense floats (:func:`dense_floats`) by averages over ranks; collective.

    Running variances, such as those of batch normalisation, become the variance of all ranks' data
    taken together, with m and v the running means and variances:

    .. math:: m \leftarrow \frac{1}{n} \sum_j m_j, \qquad
              v \leftarrow \frac{1}{n} \sum_j \big(v_j + (m_j - m)^2\big)
    """
    reshard([model])
    pairs = _statistics(model) if buffers else []
    own = [detached_copy(mean) for mean, _ in pairs]
    variances = {id(variance): variance for _, variance in pairs}
    tensors = dense_floats(model, buffers=buffers)
    if not parameters:
        tensors = [one for one in tensors if not isinstance(one, torch.nn.Parameter)]
    average_tensors([tensor for tensor in tensors if id(tensor) not in variances])
    for (mean, variance), before in zip(pairs, own, strict=True):
        variance.data.add_((before - mean.data).square())
    average_tensors(list(variances.values()))


def _statistics(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    named = [
        dict(module.named_buffers(recurse=False))
        for _, module in sorted(model.named_modules(), key=lambda one: one[0])
    ]
    return [
        (own["running_mean"], own["running_var"])
        for own in named
        if {"running_mean", "running_var"} <= own.keys()
    ]
