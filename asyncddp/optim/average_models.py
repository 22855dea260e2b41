"""Averages the ranks' models, and measures their consensus distance from that average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from asyncddp.algorithms.gradient_hooks import wait_for_reads
from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce import allreduce
from asyncddp.ops.allreduce_tensors import AVERAGED_BYTES, average_module
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.tensors.allocation import TensorBackup, make_tensor, zeros
from asyncddp.tensors.buckets import partition

M = TypeVar("M", bound=torch.nn.Module)


def consensus_distance(model: torch.nn.Module | Iterable[torch.Tensor]) -> float:
    r"""Compute the root mean square distance of the ranks' parameters from their average.

    .. math:: \Xi = \sqrt{\frac{1}{n} \sum_i \lVert x_i - \bar x \rVert_2^2}

    Collective: all ranks call it. Sums are formed in float64.

    Args:
        model: A module, all of whose parameters count, or tensors. Ranks match parameters by name,
            and tensors by their place.

    Returns:
        :math:`\Xi`, the same on all ranks; 0 where they agree.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: An argument that holds no tensors.
        MismatchError: Ranks differ in names, shapes or dtypes; raised on all of them.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.consensus_distance([torch.full((4,), float(bf.rank()))]))
        [1.0, 1.0]

    References:
        Kong et al., "Consensus control for decentralized deep learning", ICML 2021.
    """
    named = _tensors_of(model)
    require_equal_tensors(current(), "consensus_distance", named)
    square = make_tensor(squared_deviation(list(named.values())), torch.float64)
    return math.sqrt(float(allreduce(square)))


def squared_deviation(tensors: Sequence[torch.Tensor]) -> float:
    r"""Compute this rank's squared distance :math:`\lVert x_i - \bar x \rVert_2^2`; collective."""
    square = zeros((), torch.float64)
    for indices in partition(tensors, AVERAGED_BYTES):
        parts = [tensors[index].detach().to("cpu").reshape(-1) for index in indices]
        wide = torch.complex128 if parts[0].is_complex() else torch.float64
        flat = torch.cat([part.to(wide) for part in parts])
        square += (flat - allreduce(flat)).abs().square().sum()
    return float(square)


@contextmanager
def average_model(model: M, *, buffers: bool = True) -> Iterator[M]:
    r"""Replace a model's parameters and buffers by their average over ranks, in a ``with`` block.

    .. math:: \bar x = \frac{1}{n} \sum_i x_i

    It is meant for evaluation and checkpoints. Collective at the start. At the end, and after an
    exception, each rank has its own parameters and buffers again, bit by bit; nothing is sent then.

    Running means and variances, of batch normalisation, become those of all ranks' data together:
    the spread of the ranks' means is part of the variance. They were taken with each rank's own
    parameters; to have them for the average model, estimate them anew in the block, by
    ``torch.optim.swa_utils.update_bn(loader, model)``.

    Args:
        model: The module; its parameters are changed in place.
        buffers: Whether to average floating-point buffers as well; integers, such as
            ``num_batches_tracked``, and sparse buffers stay each rank's own.

    Yields:
        The model.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No module was given.
        MismatchError: Ranks differ in names, shapes or dtypes, perhaps of buffers:
            ``buffers=False`` leaves them; raised on all ranks.

    Example:
        >>> import asyncddp as bf, torch
        >>> def look():
        ...     model = torch.nn.Linear(1, 1)
        ...     torch.nn.init.constant_(model.weight, bf.rank())
        ...     with bf.average_model(model) as averaged:
        ...         inside = averaged.weight.item()
        ...     return inside, model.weight.item()
        >>> with bf.local_world(2) as world:
        ...     world.run(look)
        [(0.5, 0.0), (0.5, 1.0)]
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"average_model: argument model: expected a torch.nn.Module, got {type(model).__name__}"
        )
    named = tensors_of(model, buffers=buffers)
    require_equal_tensors(current(), "average_model", named)
    with lend_average(model, buffers=buffers):
        yield model


@contextmanager
def lend_average(model: M, *, buffers: bool, parameters: bool = True) -> Iterator[M]:
    """Do what :func:`average_model` does, unchecked, and for buffers alone where it is asked."""
    every = list(model.parameters())
    kept = [b for b in model.buffers() if b.layout == torch.strided]
    wait_for_reads(every)
    own = TensorBackup([*every, *kept])
    try:
        average_module(model, buffers=buffers, parameters=parameters)
        yield model
    finally:
        own.restore()


def _tensors_of(model: torch.nn.Module | Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        named = tensors_of(model, buffers=False)
    elif isinstance(model, Iterable):
        named = {f"tensor {position}": tensor for position, tensor in enumerate(model)}
    tensors = named.values()
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ArgumentError(
            "consensus_distance: argument model: expected a module with parameters or a list of "
            f"tensors, got {type(model).__name__}"
        )
    return named
