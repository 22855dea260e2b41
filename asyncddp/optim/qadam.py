"""``QAdamOptimizer``: Adam with a frozen second moment, so that momentum can be compressed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.errors import ArgumentError
from asyncddp.optim.adam_base import (
    MEAN,
    SQUARE,
    AdamBase,
    Parameters,
    descend,
    real_view,
    update_moments,
)
from asyncddp.tensors.allocation import zeros_like


class QAdamOptimizer(AdamBase):
    r"""Adam that freezes its second moment after a warm-up, so that ranks may average its momentum.

    Let s be the number of a parameter's step, counted from 1. While s < W, with g the gradient,
    :math:`g \leftarrow g + \lambda x`, :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`,
    :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`. From s = W on,

    .. math:: m \leftarrow \texttt{p.grad}, \qquad v \leftarrow v.

    In both stages

    .. math:: x \leftarrow x - \frac{\gamma}{1 - \beta_1^s}
        \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^s} + \epsilon}.

    Linear updates of m alone are left in the second stage, so that ranks may average m in place of
    gradients, and compress it. **Whoever averages has to do so before step()**: while
    :meth:`warming_up` is true of a parameter, ``p.grad`` is to be the average gradient; afterwards
    it is to be the average of all ranks' :meth:`next_momentum`, as compression has left it. The
    optimizer does not communicate. Without anybody who replaces gradients by momentum,
    ``grad_holds_momentum=False`` computes m from the gradient in the second stage too.

    In Bagua the averaging of momentum begins one step later, and the gradient of step W is
    averaged but not used; here no gradient is dropped. As in Bagua bias corrections keep changing
    with s though v does not, and there is no weight decay in the second stage; two options change
    that. Elements whose gradient was zero throughout the warm-up, so that v is, stay as they are in
    the second stage, where Bagua divides by :math:`\epsilon` alone. Clip gradients, or unscale
    them, before momentum is formed.

    Args:
        params: Parameters, or groups of them, as for every optimizer of ``torch.optim``.
        lr: Step size :math:`\gamma`.
        warmup_steps: W, the step with which the second stage begins; at least 2, since v is then
            known from one gradient.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`.
        freeze_bias_correction: Whether the second stage divides by
            :math:`\sqrt{1 - \beta_2^{W-1}}`, which belongs to the v that it has.
        decoupled_weight_decay: Whether both stages decay by
            :math:`x \leftarrow (1 - \gamma \lambda) x`, as AdamW does, in place of adding
            :math:`\lambda x` to the gradients of the first.
        grad_holds_momentum: Whether the second stage finds m in ``p.grad``.

    Raises:
        ArgumentError: A value that cannot be.

    Example:
        >>> import asyncddp as bf, torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimizer = bf.QAdamOptimizer([weight], lr=0.1, warmup_steps=2)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.warming_up(weight)
        True
        >>> optimizer.step()
        >>> optimizer.warming_up(weight)
        False
        >>> weight.grad = optimizer.next_momentum(weight)  # averaged and compressed, if not alone
        >>> optimizer.step()

    References:
        Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed", ICML 2021; Gan et al., "Bagua: scaling up distributed learning with
        system relaxations", VLDB 2022, whose 8-bit variant this is.
    """

    _places: Mapping[torch.Tensor, int] = MappingProxyType({})
    """Index of the group of each parameter."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_bias_correction: bool = False,
        decoupled_weight_decay: bool = False,
        grad_holds_momentum: bool = True,
    ) -> None:
        checked_integer(f"{type(self).__name__}: argument warmup_steps", warmup_steps, 2)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            warmup_steps=warmup_steps,
            freeze_bias_correction=bool(freeze_bias_correction),
            decoupled_weight_decay=bool(decoupled_weight_decay),
            grad_holds_momentum=bool(grad_holds_momentum),
        )

    def warming_up(self, parameter: torch.Tensor) -> bool:
        """Return whether the next step uses the parameter's gradient as a gradient.

        Args:
            parameter: One of the parameters of this optimizer.

        Raises:
            ArgumentError: It is none of them.
        """
        warmup: int = self._group_of(parameter)["warmup_steps"]
        return self._steps(parameter) + 1 < warmup

    def next_momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        r"""Return :math:`\beta_1 m + (1 - \beta_1) g`, to be averaged in the second stage.

        Args:
            parameter: One of the parameters of this optimizer; a grad that is None counts as zero.

        Returns:
            A new tensor of the gradient's shape and dtype.

        Raises:
            ArgumentError: It is none of the optimizer's.
        """
        weight = 1 - float(self._group_of(parameter)["betas"][0])
        with torch.no_grad():
            gradient = zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not self._steps(parameter):
                return gradient * weight
            return torch.lerp(self.state[parameter][MEAN], gradient, weight)

    @override
    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> None:
        counts = self._counted(parameters)
        decay, warmup = group["weight_decay"], group["warmup_steps"]
        if decay and group["decoupled_weight_decay"]:
            values = [real_view(parameter) for parameter in parameters]
            torch._foreach_mul_(values, 1 - float(group["lr"]) * decay)
        first = [place for place, count in enumerate(counts) if count < warmup]
        if first:
            chosen, found = [parameters[i] for i in first], [gradients[i] for i in first]
            if decay and not group["decoupled_weight_decay"]:
                values = [real_view(parameter) for parameter in chosen]
                found = list(torch._foreach_add(found, values, alpha=decay))
            means, squares = self._held(chosen, MEAN), self._held(chosen, SQUARE)
            update_moments(means, squares, found, group["betas"])
        second = [place for place, count in enumerate(counts) if count >= warmup]
        if second:
            chosen, found = [parameters[i] for i in second], [gradients[i] for i in second]
            means, squares = self._held(chosen, MEAN), self._held(chosen, SQUARE)
            if group["grad_holds_momentum"]:
                torch._foreach_copy_(means, found)
            else:
                torch._foreach_lerp_(means, found, 1 - group["betas"][0])
            for mean, square in zip(means, squares, strict=True):
                mean.masked_fill_(square == 0, 0.0)
        limit = warmup - 1 if group["freeze_bias_correction"] else max(counts)
        descend(
            [real_view(parameter) for parameter in parameters],
            self._held(parameters, MEAN),
            list(torch._foreach_sqrt(self._held(parameters, SQUARE))),
            group,
            counts,
            [min(count, limit) for count in counts],
        )

    def _steps(self, parameter: torch.Tensor) -> int:
        """Return a parameter's number of steps."""
        state = self.state.get(parameter)
        return int(state["step"]) if state else 0

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self._places:
            groups = enumerate(self.param_groups)
            self._places = {one: place for place, group in groups for one in group["params"]}
        if parameter not in self._places:
            raise ArgumentError(
                f"{type(self).__name__}: argument parameter: expected one of the optimizer's own, "
                f"got another of shape {tuple(parameter.shape)}"
            )
        return self.param_groups[self._places[parameter]]
