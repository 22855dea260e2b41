"""Rounds in which some ranks no longer train: weights that move, averages over the others."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from asyncddp.context import current
from asyncddp.engine import Desk, Program, Steps
from asyncddp.errors import ArgumentError
from asyncddp.memory.streams import order_of
from asyncddp.ops.allreduce import sum_over
from asyncddp.ops.door import averaging_dtype, check_tensor, deliver
from asyncddp.ops.forms import nonblocking, verb
from asyncddp.ops.mixing import Mixing

__all__ = ["average_among", "average_among_nonblocking", "narrowed", "pass_by_nonblocking"]


def narrowed(row: Mixing, training: Collection[int]) -> Mixing:
    r"""Move the weights of ranks that no longer train to the own tensor.

    .. math:: w'_{ii} = w_{ii} + \sum_{j \notin T} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \in T)

    Rows still sum to one. Columns do where weights are symmetric; elsewhere the mean over those who
    train is no longer kept exactly.

    Args:
        row: The weights of this rank, which trains.
        training: T, the ranks that do.

    Raises:
        ArgumentError: Tensors are scaled by their senders, so that nobody else knows by how much.

    Example:
        >>> row = narrowed(Mixing(0.5, {1: 0.25, 2: 0.25}, {1: 1.0, 2: 1.0}), training=[0, 2])
        >>> row.self_weight, row.src_weights, row.dst_weights
        (0.75, {2: 0.25}, {2: 1.0})
    """
    if row.alike != 1.0:
        raise ArgumentError(
            "join: dst_weights set by hand: expected a factor of 1 for every rank, since a rank "
            "cannot take over the share of one that is done without knowing its factor, got "
            f"{dict(row.dst_weights)}; give a list of ranks, and weigh with src_weights"
        )
    gone = [weight for peer, weight in row.src_weights.items() if peer not in training]
    return Mixing(
        math.fsum([row.self_weight, *gone]),
        {peer: weight for peer, weight in row.src_weights.items() if peer in training},
        {peer: factor for peer, factor in row.dst_weights.items() if peer in training},
    )


@verb
def pass_by(tensor: torch.Tensor, *, name: str) -> Program[torch.Tensor]:
    """Let a use of a name go by, so that it keeps its count while others exchange under it.

    Args:
        tensor: What this rank would average.
        name: The name.

    Returns:
        The tensor as it is.
    """

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Give the tensor as it is."""
        del desk
        yield from ()
        return tensor

    return Program("neighbor_allreduce", steps, name)


@verb
def average_among(tensor: torch.Tensor, number: int, *, name: str) -> Program[torch.Tensor]:
    r"""Average over some ranks, while all take part.

    .. math:: y = \frac{1}{|T|} \sum_j x_j, \qquad x_j = 0\ (j \notin T)

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks; zero on those not in T.
        number: How many are in T.
        name: For messages; all ranks must give the same.

    Returns:
        :math:`y`, the same on all ranks.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Integers or bools.
        MismatchError: Another rank calls another verb, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> def of_the_first_two():
        ...     mine = torch.tensor([bf.rank() + 1.0 if bf.rank() < 2 else 0.0])
        ...     return average_among(mine, 2, name="mean").item()
        >>> with bf.local_world(3) as world:
        ...     world.run(of_the_first_two)
        [1.5, 1.5, 1.5]
    """
    context = current()
    row = check_tensor("allreduce", tensor)
    dtype = averaging_dtype("allreduce", row, round_integers=False)
    title = f"allreduce(average over {number} that train) {name!r}"

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Sum over those that train."""
        group, wire = range(context.size), context.transport
        total = yield from sum_over(desk, group, wire, tensor, dtype, title, number)
        return deliver(total, tensor, None)

    return Program("allreduce", steps, name, ordered=True, order=order_of(tensor))


pass_by_nonblocking = nonblocking(pass_by)
average_among_nonblocking = nonblocking(average_among)
