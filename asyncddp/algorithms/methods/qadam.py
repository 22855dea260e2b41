"""``qadam``: Adam that averages compressed momentum, after a warm-up with averaged gradients."""

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.method_traits import (
    AveragedQuantity,
    CommunicationPattern,
    CommunicationTiming,
    CompressionUse,
)
from asyncddp.errors import ArgumentError
from asyncddp.tensors.local_parts import fitted, shard


class QAdam(Algorithm):
    r"""QAdam: Adam with a second moment frozen after a warm-up, so that momentum can be compressed.

    .. math:: m^{+} = Q\Big(\frac1n \sum_i Q\big(\beta_1 m + (1 - \beta_1) g_i\big)\Big)

    In the warm-up gradients are averaged uncompressed, by ``gradient_allreduce``. Afterwards each
    rank adds its gradient to the momentum, and the ranks average that, quantised as in
    ``bytegrad``; the optimizer takes it as its momentum. All ranks keep equal parameters. It works
    with :class:`asyncddp.QAdamOptimizer`, which has the number of steps of the warm-up.

    Args:
        hierarchical: Whether momentum is first summed inside each machine without quantisation,
            and quantised only for transfer between machines.

    References:
        Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed", ICML 2021. Gan et al., "Bagua: scaling up distributed learning with
        system relaxations", VLDB 2021.
    """

    name = "qadam"
    what = AveragedQuantity.MOMENTUM
    when = CommunicationTiming.GRADIENT_READY
    how = (CommunicationPattern.GLOBAL,)
    compression = CompressionUse.AVERAGES
    default_compression = "minmax_uint8"

    def __init__(self, *, hierarchical: bool = False) -> None:
        self.default_communication = "hierarchical_allreduce" if hierarchical else "allreduce"

    @override
    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "next_momentum") or not hasattr(optimizer, "warming_up"):
            raise ArgumentError(
                f"argument optimizer: {self.name} needs an optimizer that takes its momentum from "
                "the ranks' average; expected asyncddp.QAdamOptimizer, got "
                f"{type(optimizer).__name__}"
            )

    @override
    def warms_up(self, optimizer: torch.optim.Optimizer, steps: int) -> bool:
        groups = optimizer.param_groups
        return all(optimizer.warming_up(p) for group in groups for p in group["params"])  # type: ignore[attr-defined]

    @override
    def outgoing(self, bucket: AveragedBucket) -> torch.Tensor:
        views = bucket.views_of(bucket.flat)
        for parameter, view in zip(bucket.parameters, views, strict=True):
            if not bucket.optimizer.warming_up(parameter):  # type: ignore[attr-defined]
                momentum = shard(bucket.optimizer.next_momentum(parameter))  # type: ignore[attr-defined]
                fitted(view, momentum).copy_(momentum)
        return bucket.flat
