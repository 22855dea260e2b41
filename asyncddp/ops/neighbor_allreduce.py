"""``neighbor_allreduce``: the weighted average with the neighbours, what this library is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from asyncddp.context import Context, current
from asyncddp.engine import Desk, Handle, Program, Steps
from asyncddp.memory.modes import transforming
from asyncddp.memory.streams import order_of
from asyncddp.ops.door import averaging_dtype, check_tensor, deliver
from asyncddp.ops.express import Express, shorten
from asyncddp.ops.forms import in_place, nonblocking, verb_with
from asyncddp.ops.mixing import Mixing, exchange_and_mix, fits
from asyncddp.ops.weights import Weights, WeightsOf, refuse_scaling

__all__ = [
    "neighbor_allreduce",
    "neighbor_allreduce_",
    "neighbor_allreduce_nonblocking",
    "neighbor_allreduce_nonblocking_",
]

_VERB = "neighbor_allreduce"


def _looked_up(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    round_integers: bool = False,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[Express, Mixing] | None:
    """The short way and the weights, where this name and form went through lanes before."""
    del round_integers
    context = current()
    try:
        way: Express | None = context.engine.shortcuts.get((name, tensor.dtype, tensor.shape))
    except AttributeError:
        return None  # no tensor, as the long way will say
    if way is None or check or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    if transforming() is not None:
        return None  # as the long way will say
    if out is not None and out is not tensor and not fits(out, tensor):
        return None
    if round is not None and (type(round) is not int or round < 0):
        return None  # as the long way will say
    schedule = context.topologies.ranks
    if dst_weights is None and src_weights is None and self_weight is None:
        return way, way.row(schedule, round)
    given = {"self_weight": self_weight, "src_weights": src_weights, "dst_weights": dst_weights}
    weights = WeightsOf(_VERB, schedule, context.rank, given, round)
    return way, weights.at(context.engine.rounds(_VERB, name or f"{_VERB}.noname"))


def _shortcut(
    tensor: torch.Tensor, *, out: torch.Tensor | None = None, **given: Any
) -> torch.Tensor | None:
    """Average the short way, or give None."""
    found = _looked_up(tensor, out=out, **given)
    return None if found is None else found[0].run(found[1], tensor, out)


def _started(
    tensor: torch.Tensor, *, out: torch.Tensor | None = None, **given: Any
) -> Handle[torch.Tensor] | None:
    """Start averaging the short way, or give None."""
    found = _looked_up(tensor, out=out, **given)
    return None if found is None else found[0].start(found[1], tensor, out)


for _function in (_looked_up, _shortcut, _started):
    _function.__qualname__ = _VERB  # by which Python calls it where an argument is wrong


@verb_with(_shortcut, _started)
def neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Weights | Iterable[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    round_integers: bool = False,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> Program[torch.Tensor]:
    r"""Average a tensor with the neighbours' tensors.

    .. math:: y_i = w_{ii} x_i + \sum_{j \in \mathrm{src}(i)} w_{ij} d_{ji} x_j

    The weights come from the topology if none are given. With ``self_weight`` and ``src_weights``
    the topology's neighbours are weighted by hand; an in-neighbour that is left out counts 0. With
    all three the neighbours are set by hand as well, and the topology plays no part.

    Args:
        tensor: :math:`x_i`, of any shape and on any device; neighbours' agree in shape and dtype.
        self_weight: :math:`w_{ii}`.
        src_weights: :math:`w_{ij}` for the ranks j to receive from.
        dst_weights: :math:`d_{ij}` for the ranks j to send to; a list of ranks means 1 for each, as
            it must be for integers.
        name: Matches this call with the neighbours' calls of that name; by call order if None.
        round: Round of a time-varying topology; by default the number of earlier uses of the name.
        round_integers: Average integers in float64 and round half to even; refused otherwise.
        check: Return only after all receivers have confirmed that they expect the tensor.
        out: Tensor into which the result is written, which may be ``tensor`` itself. Where a
            neighbour is lost in the middle, parts of it may be averages already.

    Returns:
        :math:`y_i`, ``out`` or a new tensor with the shape, dtype and device of ``tensor``.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A rank, weight or combination of arguments that cannot be.
        DtypeError: The dtype cannot travel.
        MismatchError: A neighbour calls another verb, dtype, shape or neighbours under this name.
        WaitTimeoutError: A neighbour has not come by the deadline.

    Example:
        >>> import asyncddp as bf, topology, torch
        >>> def mean_of_two():
        ...     bf.set_topology(topology.one_peer_exponential(4))
        ...     x = bf.neighbor_allreduce(torch.tensor([float(bf.rank())]))
        ...     return bf.neighbor_allreduce(x).item()
        >>> with bf.local_world(4) as world:
        ...     world.run(mean_of_two)
        [1.5, 1.5, 1.5, 1.5]

    References:
        Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
        NeurIPS 2021.
    """
    context = current()
    row = check_tensor(_VERB, tensor)
    dtype = averaging_dtype(_VERB, row, round_integers=round_integers)
    if not row.averages:
        refuse_scaling(_VERB, "dst_weights", dst_weights, row)
    given = {"self_weight": self_weight, "src_weights": src_weights, "dst_weights": dst_weights}
    weights = WeightsOf(_VERB, context.topologies.ranks, context.rank, given, round)

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Exchange, mix and deliver."""
        total = yield from exchange_and_mix(desk, tensor, weights.at(desk.turn), dtype, out)
        if dtype == tensor.dtype and not context.config.check:
            shorten(context, _VERB, name, desk.key.name, tensor)
        return deliver(total, tensor, out)

    return Program(_VERB, steps, name, check=check, order=order_of(tensor, out))


neighbor_allreduce_nonblocking = nonblocking(neighbor_allreduce)
neighbor_allreduce_ = in_place(neighbor_allreduce)
neighbor_allreduce_nonblocking_ = nonblocking(neighbor_allreduce_)


def short_way(
    context: Context, row: Mixing, tensor: torch.Tensor, name: str
) -> Callable[[], bool] | None:
    """The short way of averaging a tensor in place, for callers that have looked its weights up.

    Args:
        context: The world.
        row: The weights.
        tensor: A contiguous tensor outside autograd.
        name: The name under which neighbours match it.

    Returns:
        A function that averages it, and tells whether it could; None where it could not by now.
    """
    way: Express | None = context.engine.shortcuts.get((name, tensor.dtype, tensor.shape))
    if way is None or not tensor.is_cpu or context.config.check or not way.open(row):
        return None
    return lambda: way.run(row, tensor, tensor) is not None
