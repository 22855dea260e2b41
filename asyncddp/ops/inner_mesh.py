"""Collectives among the ranks of one sharded replica, for decisions that they make as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.context.mesh_context import inner_context
from asyncddp.ops.allreduce import allreduce
from asyncddp.tensors.allocation import make_tensor


class InnerMesh:
    """Ranks of one sharded replica, each of which holds a shard of the same model.

    Columns of replicas never talk to each other; what a replica must do as one, such as leaving
    out a step, its ranks decide here.

    Args:
        context: The context of these ranks.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    @classmethod
    def of(cls, context: Context) -> InnerMesh | None:
        """Return the replica of a column's rank; None where replicas are whole."""
        found = inner_context(context)
        return None if found is None else cls(found)

    def agree(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank of the replica; collective."""
        return self.sum([float(flag)])[0] > 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers over the ranks of the replica, in float64; collective."""
        if self.context.size == 1:
            return list(values)
        with use(self.context):
            total = allreduce(make_tensor(list(values), torch.float64), op="sum")
        return [float(one) for one in total.tolist()]

    def mean(self, value: float) -> float:
        """Average a number over the ranks of the replica, in float64; collective."""
        return self.sum([value])[0] / self.context.size
