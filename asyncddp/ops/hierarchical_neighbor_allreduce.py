"""``hierarchical_neighbor_allreduce``: the mean inside a machine, neighbours between machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncddp.context import Context, current
from asyncddp.engine import Desk, Program, Steps
from asyncddp.errors import ArgumentError
from asyncddp.memory.streams import order_of
from asyncddp.ops.allgather import gather_over
from asyncddp.ops.allreduce import members, sum_over
from asyncddp.ops.door import averaging_dtype, check_tensor, deliver
from asyncddp.ops.forms import in_place, nonblocking, verb
from asyncddp.ops.mixing import Mixing, exchange_and_mix
from asyncddp.ops.weights import Weights, WeightsOf
from topology import Schedule, as_schedule, complete

__all__ = [
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_",
    "hierarchical_neighbor_allreduce_nonblocking",
    "hierarchical_neighbor_allreduce_nonblocking_",
]

_VERB = "hierarchical_neighbor_allreduce"


@verb
def hierarchical_neighbor_allreduce(
    tensor: torch.Tensor,
    *,
    self_weight: float | None = None,
    src_machine_weights: Weights | None = None,
    dst_machine_weights: Weights | Iterable[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    round_integers: bool = False,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> Program[torch.Tensor]:
    r"""Average inside each machine, then with the neighbour machines.

    .. math:: y_m = w_{mm} \bar x_m + \sum_{m'} w_{mm'} d_{m'm} \bar x_{m'}, \qquad
              \bar x_m = \frac{1}{L} \sum_{i \in m} x_i

    Every rank of a machine exchanges its own share of :math:`\bar x_m` with the rank of the same
    number on each neighbour machine, so that a machine sends one model whatever ``local_size()``.

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks.
        self_weight: :math:`w_{mm}`.
        src_machine_weights: :math:`w_{mm'}` for the machines to receive from.
        dst_machine_weights: :math:`d_{mm'}` for the machines to send to; a list means 1 for each.
            The weights default to the machine topology's, as in ``neighbor_allreduce``; all ranks
            of a machine must give the same.
        name: For messages; all ranks must give the same.
        round: Round of a time-varying topology; by default the number of earlier uses.
        round_integers: Average integers in float64 and round half to even; refused otherwise.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y_m`, the same on all ranks of a machine: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No machine topology is set, machines differ in size, or a machine or weight
            that cannot be.
        DtypeError: The dtype cannot travel.
        MismatchError: Another rank calls another verb, dtype, shape or neighbours.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, topology, torch
        >>> def mean():
        ...     bf.set_machine_topology(topology.ring(2))
        ...     x = torch.tensor([float(bf.rank())])
        ...     return bf.hierarchical_neighbor_allreduce(x).item()
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(mean)
        [1.5, 1.5, 1.5, 1.5]
    """
    context = current()
    dtype = averaging_dtype(_VERB, check_tensor(_VERB, tensor), round_integers=round_integers)
    if not context.machines.homogeneous:
        sizes = [len(machine) for machine in context.machines.members]
        raise ArgumentError(
            f"{_VERB}: expected machines with equally many ranks, numbered one machine after the "
            f"other; got machines of {sizes} ranks. Start equally many on each (slots=…), with "
            "ranks mapped by slot"
        )
    weights = WeightsOf(
        _VERB,
        between_machines(context, by_hand=dst_machine_weights is not None),
        context.machine_rank,
        {
            "self_weight": self_weight,
            "src_machine_weights": src_machine_weights,
            "dst_machine_weights": dst_machine_weights,
        },
        round,
    )

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Sum inside the machine, exchange between machines, and mix."""
        mixing = between_ranks(context, weights.at(desk.turn))
        group, wire = members(context, local=True)
        total = yield from sum_over(desk, group, wire, tensor, dtype, _VERB, len(group))
        share = total.reshape(-1).tensor_split(len(group))[context.local_rank]
        mixed = yield from exchange_and_mix(desk, share, mixing, dtype)
        whole = yield from gather_over(desk, group, wire, mixed.reshape(-1), _VERB)
        return deliver(whole.view(total.shape), tensor, out)

    order = order_of(tensor, out)
    return Program(_VERB, steps, name, ordered=True, check=check, order=order)


hierarchical_neighbor_allreduce_nonblocking = nonblocking(hierarchical_neighbor_allreduce)
hierarchical_neighbor_allreduce_ = in_place(hierarchical_neighbor_allreduce)
hierarchical_neighbor_allreduce_nonblocking_ = nonblocking(hierarchical_neighbor_allreduce_)


def between_machines(context: Context, *, by_hand: bool) -> Schedule:
    """The machine topology; where all weights are set by hand it plays no part, and need not be."""
    if by_hand and context.topologies.load_machine() is None:
        return as_schedule(complete(context.machine_size))
    return context.topologies.machines


def between_ranks(context: Context, mixing: Mixing) -> Mixing:
    """The row of a machine, as a row of the rank that talks to its twins on other machines."""

    def twins(weights: Mapping[int, float]) -> dict[int, float]:
        """The ranks of other machines that stand where this one stands."""
        every = context.machines.members
        return {every[machine][context.local_rank]: weight for machine, weight in weights.items()}

    return Mixing(mixing.self_weight, twins(mixing.src_weights), twins(mixing.dst_weights))
