"""Average many tensors, or a module's parameters, over all ranks, packed into few messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncddp.engine import Handle
from asyncddp.ops.allreduce import allreduce_nonblocking
from asyncddp.ops.settings_agreement import tensors_of
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.buckets import FlatBucket, partition

AVERAGED_BYTES = 32 << 20
"""Most bytes of tensors that are averaged at a time."""


def average_tensors(
    tensors: Sequence[torch.Tensor],
    average: Callable[[torch.Tensor], Handle[torch.Tensor]] = allreduce_nonblocking,
) -> None:
    r"""Replace tensors by their averages over ranks; collective.

    They are dense floats, alike on all ranks in number, shapes and dtypes, and are written through
    their ``data``, which leaves autograd's records alone. ``average`` starts that of one message.
    """
    content = [tensor.data for tensor in tensors]
    under_way = []
    for indices in partition(content, AVERAGED_BYTES):
        bucket = FlatBucket([content[index] for index in indices])
        for view, index in zip(bucket.views, indices, strict=True):
            view.copy_(content[index])
        under_way.append((bucket, indices, average(bucket.flat)))
    for bucket, indices, handle in under_way:
        bucket.flat.copy_(handle.wait())
        for view, index in zip(bucket.views, indices, strict=True):
            content[index].copy_(view)


def dense_floats(model: torch.nn.Module, *, buffers: bool) -> list[torch.Tensor]:
    """Return a module's dense floating-point parameters, and optionally buffers, sorted by name."""
    return [
        tensor
        for tensor in tensors_of(model, buffers=buffers).values()
        if tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex())
    ]


def average_module(model: torch.nn.Module, *, buffers: bool, parameters: bool = True) -> None:
    r"""Replace a module's :func:`dense_floats`, or buffers alone, by averages; collective.

    Running variances, such as those of batch normalisation, become the variance of all ranks' data
    taken together, with m and v the running means and variances:

    .. math:: m \leftarrow \frac{1}{n} \sum_j m_j, \qquad
              v \leftarrow \frac{1}{n} \sum_j \big(v_j + (m_j - m)^2\big)
    """
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
