"""Parameters and buffers that Bagua's wrappers communicate and make equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncddp.algorithms.gradient_hooks import wait_for_reads
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce_tensors import average_tensors, broadcast_tensors
from asyncddp.ops.settings_agreement import tensors_of
from asyncddp.optim.parameter_sync import broadcast_parameters
from asyncddp.optim.state_broadcast import broadcast_optimizer_state

_IGNORED = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")


def ignored_names(module: torch.nn.Module) -> set[str]:
    """Return the names that attributes of the module exclude from communication.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> model._ddp_params_and_buffers_to_ignore = ["bias"]
        >>> list(communicated_state(model))
        ['weight']
    """
    return {name for attribute in _IGNORED for name in getattr(module, attribute, ())}


def is_expert(tensor: torch.Tensor) -> bool:
    """Return True for a parameter of an expert, which stays different on each rank."""
    return bool(getattr(tensor, "expert", False))


def communicated_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return names and parameters to communicate, in the order of registration.

    These are trained, no experts and not ignored; a shared parameter appears once.
    """
    ignored = ignored_names(module)
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored and not is_expert(parameter)
    ]


def unmanaged_parameters(
    module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return names and parameters to communicate that belong to no optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    managed = {id(parameter) for group in groups for parameter in group["params"]}
    return [pair for pair in communicated_parameters(module) if id(pair[1]) not in managed]


def communicated_state(module: torch.nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Return parameters, and optionally buffers, to make equal at the start, sorted by name."""
    ignored = ignored_names(module)
    return {
        name: tensor
        for name, tensor in tensors_of(module, buffers=buffers).items()
        if name not in ignored and not is_expert(tensor)
    }


def broadcast_state(context: Context, named: Mapping[str, torch.Tensor]) -> None:
    """Broadcast the tensors of a context's first rank to all its ranks; collective."""
    with use(context):
        broadcast_parameters(named)


def average_state(context: Context, named: Mapping[str, torch.Tensor]) -> None:
    r"""Replace float tensors by their averages over ranks, and others by rank 0's; collective.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_j x_j
    """
    tensors = [tensor.detach() for tensor in named.values()]
    wait_for_reads(list(named.values()))
    floats = [one for one in tensors if one.is_floating_point() or one.is_complex()]
    others = [one for one in tensors if not (one.is_floating_point() or one.is_complex())]
    with use(context), torch.no_grad():
        average_tensors(floats)
        broadcast_tensors(others)


def broadcast_optimizer(context: Context, optimizer: torch.optim.Optimizer) -> None:
    """Broadcast optimizer state and options of a context's first rank; collective.

    Raises:
        ArgumentError: It is an L-BFGS, which has no state for each parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError(
            "with_bagua: argument optimizers: expected optimizers with a state for each parameter, "
            "got LBFGS; give asyncddp.DistributedOptimizer(optimizer, model, "
            "algorithm='gradient_allreduce') in its place"
        )
    with use(context):
        broadcast_optimizer_state(optimizer)
