"""Groups parameters into buckets, in the order in which gradients come, each with an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncddp.parallel.optimizer_buckets import (
    CopyOptimizerBucket,
    LRSchedulerFn,
    NamedParameters,
    OptimFn,
    OptimizerBucket,
    ViewOptimizerBucket,
)
from asyncddp.tensors.buckets import TensorFactory, partition


@dataclass(frozen=True)
class TrainingConfig:
    """Training settings of a model: optimizers, schedulers, scaler, clipping, bucket size.

    Attributes:
        optim_fn: Creates the optimizer of a bucket.
        lr_scheduler_fn: Creates the scheduler of an optimizer.
        scaler: GradScaler of the gradients, or None.
        grad_clip_norm: Largest norm of all gradients together; 0 for any.
        bucket_bytes: Largest size of a bucket, in bytes.
        as_view: Whether parameters are views of the buckets.
    """

    optim_fn: OptimFn
    lr_scheduler_fn: LRSchedulerFn | None
    scaler: torch.amp.GradScaler | None
    grad_clip_norm: float
    bucket_bytes: int
    as_view: bool

    @property
    def updates_together(self) -> bool:
        """True if an update needs the gradients of all buckets."""
        return self.scaler is not None or self.grad_clip_norm > 0


def build_buckets(
    named: NamedParameters,
    parts: Sequence[Sequence[int]],
    config: TrainingConfig,
    tensor_factory: TensorFactory | None,
) -> list[tuple[OptimizerBucket, list[int]]]:
    """Create buckets with their optimizers, in order; no bucket holds parameters of two parts.

    Args:
        named: Names and parameters to train.
        parts: Indices of parameters, in the order in which buckets take them.
        config: How to train.
        tensor_factory: Factory for the memory of buckets; None for ordinary memory.

    Returns:
        Each bucket, and the indices of its parameters.

    Raises:
        ArgumentError: The user's functions returned something unusable.
    """
    bucket_type: Callable[..., OptimizerBucket] = (
        ViewOptimizerBucket if config.as_view else CopyOptimizerBucket
    )
    built: list[tuple[OptimizerBucket, list[int]]] = []
    for part in parts:
        for positions in partition([named[index][1] for index in part], config.bucket_bytes):
            members = [part[position] for position in positions]
            chosen = [named[index] for index in members]
            with torch.no_grad():
                bucket = bucket_type(len(built), chosen, tensor_factory)
            bucket.create_optimizer(config.optim_fn, config.lr_scheduler_fn)
            built.append((bucket, members))
    return built
