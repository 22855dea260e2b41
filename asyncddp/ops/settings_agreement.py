"""Checks that settings, tensor names and shapes are equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncddp.agreement import Facts, T, agree
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.context.mesh_context import inner_context
from asyncddp.errors import ArgumentError
from asyncddp.ops.object_collectives import gather_records
from asyncddp.tensors.local_parts import is_distributed


def require_equal_on_all_ranks(context: Context, claim: str, facts: Sequence[str]) -> None:
    """Raise MismatchError on all ranks unless their ``facts`` are equal; collective.

    ``claim`` states the requirement, such as "training needs the same model"; ``facts`` are
    sentences about this rank, in an order that is the same on all ranks.
    """
    _agree(context, list(facts), claim)


def _agree(context: Context, facts: Facts, claim: str, remedy: str = "") -> None:
    """Compare facts on all ranks; the subject of ``claim`` names the caller; collective."""
    who = claim.partition(" need")[0]

    def gather(mine: T, kind: type[T]) -> list[T]:
        return gather_records(mine, kind, who)

    if context.size > 1:
        with use(context):
            agree(gather, facts, f"rank {context.rank}: {claim}", remedy, context.members)


def tensors_of(module: torch.nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name, sorted; a shared one appears once."""
    every: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if buffers:
        every.update(module.named_buffers(remove_duplicate=False))
    once: dict[int, str] = {}
    for name in sorted(every):
        once.setdefault(id(every[name]), name)
    return {name: every[name] for name in once.values()}


def require_equal_tensors(context: Context, who: str, named: Mapping[str, torch.Tensor]) -> None:
    """Raise MismatchError on all ranks unless their tensors agree in names, shapes and dtypes.

    The message names ``who`` as the caller that needs it, and the tensors that differ.

    Raises:
        ArgumentError: One is a DTensor, and ``context`` is not that of a column of replicas.
    """
    sharded = next((name for name, one in named.items() if is_distributed(one)), None)
    if sharded is not None and inner_context(context) is None:
        raise ArgumentError(
            f"{who}: {sharded} is a DTensor, of which this rank has a part; give "
            "mesh=mesh['replica'], the dimension of the mesh along which it is not sharded, or "
            "call it within bf.replicas(mesh['replica'])"
        )
    forms = {
        name: f"{str(named[name].dtype).removeprefix('torch.')} of shape {tuple(named[name].shape)}"
        for name in sorted(named)
    }
    claim = f"{who} needs tensors of the same names, shapes and dtypes on all ranks"
    _agree(context, forms, claim, ". Build the same model on all ranks")
