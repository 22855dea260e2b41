"""``AdamBase``: base class of optimizers derived from Adam, with the code that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import zeros, zeros_like
from asyncddp.tensors.local_parts import shard

Parameters: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
MEAN, SQUARE = "exp_avg", "exp_avg_sq"


class AdamBase(torch.optim.Optimizer):
    """Base class of Adam-like optimizers; subclasses define how the moments are updated.

    The state of a parameter is made at its first gradient: ``step``, and a tensor of zeros for each
    of ``_moments``.
    """

    _moments: tuple[str, ...] = (MEAN, SQUARE)

    def __init__(
        self,
        params: Parameters,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        for argument, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ArgumentError(
                    f"{name}: argument {argument}: expected at least 0, got {value!r}"
                )
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ArgumentError(
                f"{name}: argument betas: expected two numbers of at least 0 and below 1, got "
                f"{betas!r}"
            )
        usual = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**usual, **options})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one optimizer step.

        Args:
            closure: Evaluates the model and gives the loss; called once, before the step.

        Returns:
            The loss that the closure gave, or None.

        Raises:
            ArgumentError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                gradients = [self._dense(parameter.grad) for parameter in parameters]
                if parameters:
                    self._update(group, parameters, gradients)
        return loss

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> None:
        """Update the parameters of a group; ``gradients`` are real views."""
        raise NotImplementedError

    def _counted(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Increment the step count of each parameter, and return the counts."""
        states = [self._state_of(parameter) for parameter in parameters]
        for state in states:
            state["step"] += 1
        return [int(state["step"]) for state in states]

    def _held(self, parameters: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        """Return one moment of each parameter, as real views."""
        return [real_view(self._state_of(parameter)[key]) for parameter in parameters]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = zeros((), torch.int64)
            for key in self._moments:
                state[key] = zeros_like(parameter)
        return state

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout != torch.strided:
            raise ArgumentError(
                f"{type(self).__name__}: the gradient of a parameter of shape "
                f"{tuple(gradient.shape)} is {gradient.layout}; expected a dense one. Build the "
                "embedding with sparse=False"
            )
        return real_view(gradient)


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of real numbers, and a DTensor as its local part."""
    part = shard(tensor)
    return torch.view_as_real(part) if part.is_complex() else part


def update_moments(
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    gradients: list[torch.Tensor],
    betas: tuple[float, float],
) -> None:
    """Update Adam's moments m and v in place."""
    torch._foreach_lerp_(means, gradients, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])


def descend(
    values: list[torch.Tensor],
    means: list[torch.Tensor],
    roots: list[torch.Tensor],
    group: dict[str, Any],
    mean_counts: Sequence[int],
    square_counts: Sequence[int],
) -> None:
    r"""Apply Adam's update to ``values``, in place.

    .. math:: x \leftarrow x - \gamma \frac{m / (1 - \beta_1^s)}
        {\sqrt{v} / \sqrt{1 - \beta_2^{s'}} + \epsilon}

    Args:
        values: x of each parameter.
        means: m of each.
        roots: The square root of v of each; overwritten.
        group: The parameter group, with lr, betas and eps.
        mean_counts: s of each, for the bias correction of m.
        square_counts: s' of each, for the bias correction of v.
    """
    beta1, beta2 = group["betas"]
    torch._foreach_div_(roots, [(1 - beta2**count) ** 0.5 for count in square_counts])
    torch._foreach_add_(roots, group["eps"])
    lr = float(group["lr"])
    torch._foreach_addcdiv_(values, means, roots, [-lr / (1 - beta1**s) for s in mean_counts])
