"""Assertions that compare tensors and values across ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from asyncddp.context import current
from asyncddp.ops.object_collectives import allgather_object
from asyncddp.optim import consensus_distance


def assert_consensus(model: torch.nn.Module | Iterable[torch.Tensor], within: float = 0.0) -> None:
    r"""Assert that the ranks' parameters are near their average.

    .. math:: \sqrt{\tfrac{1}{n} \textstyle\sum_i \lVert x_i - \bar x \rVert_2^2} \le \epsilon

    Collective: all ranks call it, and all fail or none does.

    Args:
        model: A module, all of whose parameters count, or tensors.
        within: :math:`\epsilon`, the largest distance that is right.

    Raises:
        AssertionError: They are further away; the message says how far.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: assert_consensus([torch.ones(3) * bf.rank()], within=1.0))
        [None, None]
    """
    distance = consensus_distance(model)
    if not distance <= within:
        raise AssertionError(
            f"the parameters of {current().size} ranks are {distance:g} from their average, "
            f"expected at most {within:g}"
        )


def assert_alike(value: object) -> None:
    """Assert that all ranks hold equal values, and of tensors the same bits.

    Collective: all ranks call it, and all fail or none does.

    Args:
        value: What pickle can carry and ``==`` can compare; or a tensor.

    Raises:
        AssertionError: A rank holds something else than rank 0; the message shows both.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: assert_alike(bf.size()))
        [None, None]
    """
    every = allgather_object(value)
    for rank, other in enumerate(every):
        if not _same(every[0], other):
            raise AssertionError(f"rank 0 holds {every[0]!r}, but rank {rank} holds {other!r}")


def _same(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
