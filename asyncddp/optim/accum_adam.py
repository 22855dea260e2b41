"""``AccumAdam`` and ``AccumAdamW``: Adam variants that update their moments every K-th step."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.optim.adam_base import (
    MEAN,
    SQUARE,
    AdamBase,
    Parameters,
    descend,
    real_view,
    update_moments,
)


class AccumAdam(AdamBase):
    r"""Adam that steps at every gradient, but updates its moments with means of K gradients.

    With g the gradient of step t, :math:`g \leftarrow g + \lambda x`, and k = ⌈t / K⌉:

    .. math::
        \hat m &= \beta_1 m + (1 - \beta_1) g, \qquad
        \hat v = \beta_2 v + (1 - \beta_2) g^2, \qquad a \leftarrow a + g / K \\
        x &\leftarrow x - \gamma \frac{\hat m / (1 - \beta_1^k)}
            {\sqrt{\hat v / (1 - \beta_2^k)} + \epsilon}

    and where K divides t, :math:`m \leftarrow \beta_1 m + (1 - \beta_1) a`,
    :math:`v \leftarrow \beta_2 v + (1 - \beta_2) a^2`, :math:`a \leftarrow 0`.

    The moments follow gradients of a batch that is K times as large, while averaging with the
    neighbours takes place in every step. With K = 1 it is ``torch.optim.Adam`` bit for bit (with
    ``foreach=True``, for dtypes in which that rounds differently), whose names and meanings the
    state has; there is a sum ``accum_grad`` beside it.

    Args:
        params: Parameters, or groups of them, as for every optimizer of ``torch.optim``.
        lr: Step size :math:`\gamma`.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        accum_iter: K, the number of gradients in a mean.

    Raises:
        ArgumentError: A value that cannot be.

    Example:
        >>> import asyncddp as bf, torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimizer = bf.AccumAdam([weight], lr=0.1, weight_decay=0.0, accum_iter=2)
        >>> for _ in range(3):
        ...     weight.grad = torch.ones(1)
        ...     optimizer.step()
        >>> weight.item()  # each step was of full length
        0.70...

    References:
        Wang, Zhang, Wu, Johansson, "From promise to practice: realizing high-performance
        decentralized training", ICLR 2025.
    """

    _decoupled = False
    _moments = (MEAN, SQUARE, "accum_grad")

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1 / 32768,
        accum_iter: int = 4,
    ) -> None:
        checked_integer(f"{type(self).__name__}: argument accum_iter", accum_iter, 1)
        super().__init__(params, lr, betas, eps, weight_decay, accum_iter=accum_iter)

    @override
    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> None:
        counts = self._counted(parameters)
        values = [real_view(parameter) for parameter in parameters]
        means, squares, sums = (self._held(parameters, key) for key in self._moments)
        lr, decay, every = float(group["lr"]), group["weight_decay"], group["accum_iter"]
        beta1, beta2 = group["betas"]
        if decay and self._decoupled:
            torch._foreach_mul_(values, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, values, alpha=decay))
        torch._foreach_add_(sums, gradients, alpha=1 / every)
        # step along the moments as this gradient would make them; they stay unchanged
        rounds = [-(-t // every) for t in counts]
        mean = torch._foreach_lerp(means, gradients, 1 - beta1)
        root = torch._foreach_mul(squares, beta2)
        torch._foreach_addcmul_(root, gradients, gradients, 1 - beta2)
        torch._foreach_sqrt_(root)
        descend(values, list(mean), list(root), group, rounds, rounds)
        # update the moments of those with K gradients by their mean, and reset that
        full = [position for position, t in enumerate(counts) if t % every == 0]
        if full:
            means, squares, sums = ([one[i] for i in full] for one in (means, squares, sums))
            update_moments(means, squares, sums, group["betas"])
            torch._foreach_zero_(sums)


class AccumAdamW(AccumAdam):
    r"""``AdamW`` that updates its moments once per K gradients, like :class:`AccumAdam`.

    Each step begins with :math:`x \leftarrow (1 - \gamma \lambda) x`, in place of
    :math:`g \leftarrow g + \lambda x`. With K = 1 it is ``torch.optim.AdamW`` bit for bit.

    Example:
        >>> import asyncddp as bf, torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimizer = bf.AccumAdamW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(weight.item(), 6)  # 1 - 0.05 of decay - 0.1
        0.85

    References:
        Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    _decoupled = True

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, accum_iter)
