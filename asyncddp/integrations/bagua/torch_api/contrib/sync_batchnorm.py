"""Bagua's ``bagua.torch_api.contrib.sync_batchnorm``: batch normalisation over all ranks' data."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup, group_or_default
from asyncddp.ops.allgather import allgather
from asyncddp.ops.allreduce import allreduce
from asyncddp.tensors.allocation import detached_copy

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    r"""Batch normalisation with mean and variance over the batches of all ranks.

    .. math:: \mu = \frac{1}{N} \sum_i n_i \mu_i, \qquad
              \sigma^2 = \frac{1}{N} \sum_i n_i \big(\sigma_i^2 + (\mu_i - \mu)^2\big), \qquad
              N = \sum_i n_i

    In training each forward pass gathers :math:`\mu_i, \sigma_i^2, n_i`, and each backward pass
    sums two numbers for each channel over all ranks; in evaluation nothing is sent. Gradients of
    weight and bias are each rank's own, which ``with_bagua`` averages.

    Args:
        num_features: Number of channels, dimension 1 of inputs of at least 2 dimensions.
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; None averages all batches.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether there are running statistics.
        process_group: The ranks; all by default.

    Raises:
        ArgumentError: An input with fewer than 2 dimensions.

    Example:
        >>> import asyncddp as bf
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> def normalise():
        ...     bagua.init_process_group()
        ...     norm = SyncBatchNorm(1, eps=0.0, affine=False)
        ...     return norm(torch.full((2, 1), float(bagua.get_rank()))).tolist()
        >>> with bf.local_world(2) as world:
        ...     world.run(normalise)
        [[[-1.0], [-1.0]], [[1.0], [1.0]]]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    @override
    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(
                f"SyncBatchNorm: argument input: expected at least 2 dimensions, got {input.dim()}"
            )

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        context = group_or_default(self.process_group).require_member("SyncBatchNorm")
        axes = [axis for axis in range(input.dim()) if axis != 1]
        mean, variance, count = _global_statistics(context, input.detach(), axes)
        if self.training:
            self._track(mean, variance * (count / max(count - 1, 1)))
        normalised: torch.Tensor = _SyncBatchNormFunction.apply(  # type: ignore[no-untyped-call]
            input, mean, torch.rsqrt(variance + self.eps), count, context, axes
        )
        if self.weight is None:
            return normalised
        shape = _channel_shape(input)
        return normalised * self.weight.view(shape) + self.bias.view(shape)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics, if there are any, with a batch's mean and variance."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), weight)
            self.running_var.lerp_(variance.to(self.running_var), weight)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: BaguaProcessGroup | None = None
    ) -> torch.nn.Module:
        """Replace all batch normalisation layers of a module by SyncBatchNorm; keep the parameters.

        Args:
            module: The module; a layer by itself is returned converted.
            process_group: The ranks; all by default.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            for kind in ("_parameters", "_buffers"):
                vars(made)[kind].update(vars(module)[kind])
            made.training = module.training
            return made
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module


def _channel_shape(like: torch.Tensor) -> list[int]:
    return [1, -1, *[1] * (like.dim() - 2)]


def _global_statistics(
    context: Context, values: torch.Tensor, axes: list[int]
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return each channel's mean and variance over all ranks, and its number of elements."""
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    count, shape = values.numel() // max(values.shape[1], 1), _channel_shape(values)
    mean = wide.sum(axes) / max(count, 1)
    variance = (wide - mean.view(shape)).square().sum(axes) / max(count, 1)
    own = torch.stack([mean, variance, detached_copy(mean).fill_(count)])
    with use(context):
        means, variances, counts = allgather(own[None]).unbind(1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean, variance, float(total[0])


class _SyncBatchNormFunction(torch.autograd.Function):
    """Autograd function that normalises with mean and standard deviation over all ranks' data."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        count: float,
        context: Context,
        axes: list[int],
    ) -> torch.Tensor:
        shape = _channel_shape(values)
        normalised = (values - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalised, scale)
        ctx.count, ctx.context, ctx.axes = count, context, axes
        return normalised.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalised, scale = ctx.saved_tensors
        wide = gradient.to(normalised.dtype)
        sums = torch.stack([wide.sum(ctx.axes), (wide * normalised).sum(ctx.axes)])
        with use(ctx.context):
            mean, slope = allreduce(sums, average=False).div_(ctx.count)
        shape = _channel_shape(gradient)
        centred = wide - mean.view(shape) - normalised * slope.view(shape)
        result = (centred * scale.view(shape)).to(gradient.dtype)
        return result, None, None, None, None, None
