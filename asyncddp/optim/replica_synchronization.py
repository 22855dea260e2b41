"""Functions that make models and optimizer states equal on all ranks, by average or broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import torch

from asyncddp.algorithms.gradient_hooks import wait_for_reads
from asyncddp.context import current
from asyncddp.ops.allreduce_tensors import (
    average_module,
    average_tensors,
    broadcast_tensors,
    dense_floats,
)
from asyncddp.ops.inner_mesh import InnerMesh
from asyncddp.ops.object_collectives import gather_records
from asyncddp.ops.settings_agreement import require_equal_tensors, tensors_of
from asyncddp.optim.parameter_sync import broadcast_parameters
from asyncddp.tensors.byte_views import as_bytes, on_host
from asyncddp.tensors.local_parts import reshard, shard

POLICIES = ("average", "rank0", "keep")


def unify_replicas(models: Sequence[torch.nn.Module], policy: str) -> None:
    r"""Make the ranks' models equal according to a policy; collective.

    ``"average"`` replaces floating-point parameters and buffers by their averages over ranks,
    variances by the variance of all data, and takes all other tensors from rank 0; ``"rank0"``
    takes all from rank 0; ``"keep"`` does nothing. Parameters that are bitwise equal on all ranks
    do not change.
    """
    if policy == "rank0":
        for model in models:
            broadcast_parameters(model)
    if policy != "average":
        return
    reshard(models)
    for model in models:
        every = list(tensors_of(model).values())
        wait_for_reads(every)
        with torch.no_grad():
            average_module(model, buffers=True, parameters=tensors_differ(_parameters(model)))
            floats = {id(one) for one in dense_floats(model, buffers=True)}
            broadcast_tensors([one for one in every if id(one) not in floats])


def unify_state(optimizer: torch.optim.Optimizer, policy: str) -> None:
    """Make the ranks' optimizer states equal according to a policy; collective.

    ``"average"`` replaces floating-point tensors by their averages, and takes others from rank 0.
    """
    named = {
        f"{key} of parameter {place} of group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    }
    if policy == "keep":
        return
    require_equal_tensors(current(), "a switch that makes optimizers agree", named)
    floats = [one for one in named.values() if policy == "average" and one.is_floating_point()]
    average_tensors(floats)
    chosen = {id(one) for one in floats}
    broadcast_tensors([one for one in named.values() if id(one) not in chosen])


def _parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(tensors_of(model, buffers=False).values())


def tensors_differ(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether these tensors differ in any bit between ranks; collective."""
    digest = sha256()
    for tensor in tensors:
        digest.update(as_bytes(on_host(shard(tensor))).numpy().data)
    found = len(set(gather_records(digest.hexdigest(), str, "comparison of parameters"))) > 1
    inner = InnerMesh.of(current())
    return found if inner is None else inner.agree(found)
