"""Agreement of replicas: what becomes of the ranks' different models where a method ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncddp.algorithms.gradient_hooks import wait_for_reads
from asyncddp.errors import ArgumentError
from asyncddp.ops.allreduce_tensors import average_module, dense_floats
from asyncddp.ops.broadcast import broadcast_nonblocking_
from asyncddp.ops.settings_agreement import tensors_of
from asyncddp.optim.parameter_sync import broadcast_parameters

POLICIES = ("average", "rank0", "keep")


def checked_policy(policy: Any) -> str:
    """Check the name of a policy."""
    if policy not in POLICIES:
        raise ArgumentError(
            f"argument replicas: expected one of {', '.join(map(repr, POLICIES))}, got {policy!r}"
        )
    return str(policy)


def unify_replicas(models: Sequence[torch.nn.Module], policy: str, *, differ: bool) -> None:
    r"""Make the ranks' models equal, by the policy; collective.

    ``"average"`` replaces floating-point parameters and buffers by their averages over ranks,
    variances by those of all data, and takes all else from rank 0; ``"rank0"`` takes all from rank
    0; ``"keep"`` does nothing. Parameters that do not ``differ`` keep their bits.
    """
    if policy == "rank0":
        for model in models:
            broadcast_parameters(model)
    if policy != "average":
        return
    for model in models:
        every = list(tensors_of(model).values())
        wait_for_reads(every)
        with torch.no_grad():
            average_module(model, buffers=True, parameters=differ)
            floats = {id(one) for one in dense_floats(model, buffers=True)}
            others = [one for one in every if id(one) not in floats]
            for handle in [broadcast_nonblocking_(one, 0) for one in others]:
                handle.wait()
