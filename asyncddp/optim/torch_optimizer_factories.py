"""Functions that create optimizers and schedulers, for ``DecentralizedDataParallel``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from asyncddp.algorithms.wrapper_setup import checked_integer
from asyncddp.errors import ArgumentError
from asyncddp.optim.accum_adam import AccumAdam, AccumAdamW


def optim_fn_adam(
    params: Iterable[tuple[str, torch.Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
) -> torch.optim.Adam:
    """Create ``torch.optim.Adam`` without weight decay on biases and norms.

    Parameters of one dimension or none, and those whose names end in "bias", get no weight decay;
    all others do. (The helpers of these names in BlueFog's fork and in Decent-DP have it the other
    way round: only parameters with "bn" or "bias" in their names decay there.)

    Args:
        params: Names and parameters, such as ``model.named_parameters()``.
        lr: Step size.
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        weight_decay: Of the parameters that get one.
        eps: Added to the root of the second moment.

    Returns:
        The optimizer, with a group for each of the two kinds that there are.

    Raises:
        ArgumentError: ``params`` are no names with parameters, or there are none.

    Example:
        >>> import asyncddp as bf, torch
        >>> optimizer = bf.optim_fn_adam(torch.nn.Linear(3, 2).named_parameters())
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(1, 3.0517578125e-05), (1, 0.0)]
    """
    groups = _groups("optim_fn_adam", params, weight_decay)
    return torch.optim.Adam(groups, lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_adamw(
    params: Iterable[tuple[str, torch.Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Create ``torch.optim.AdamW``; otherwise like :func:`optim_fn_adam`."""
    groups = _groups("optim_fn_adamw", params, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_accum_adam(
    params: Iterable[tuple[str, torch.Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1 / 32768,
    accum_iter: int = 4,
) -> AccumAdam:
    """Create :class:`AccumAdam` with ``accum_iter``; otherwise like :func:`optim_fn_adam`."""
    groups = _groups("optim_fn_accum_adam", params, weight_decay)
    return AccumAdam(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def optim_fn_accum_adamw(
    params: Iterable[tuple[str, torch.Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
) -> AccumAdamW:
    """Create :class:`AccumAdamW` with ``accum_iter``; otherwise like :func:`optim_fn_adam`."""
    groups = _groups("optim_fn_accum_adamw", params, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: torch.optim.Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LambdaLR:
    r"""Create a scheduler with linear warm-up, followed by half a cosine down.

    .. math::
        \gamma_t = \begin{cases}
            \gamma \big(d + (1 - d)\, t / t_w\big) & t < t_w \\
            \gamma_{\min} + \tfrac12 (\gamma - \gamma_{\min})
                \big(1 + \cos(\pi (t - t_w) / T)\big) & t_w \le t \le t_w + T \\
            \gamma_{\min} & \text{afterwards}
        \end{cases}

    The step sizes are a function of t alone, so that a run which is resumed goes on exactly.

    Args:
        optimizer: Whose step sizes it sets; those it has now are :math:`\gamma`.
        t_max: Steps of the cosine, T.
        t_warmup: Steps of the line before it, :math:`t_w`; 0 for none.
        cosine_eta_min: Step size at the end, :math:`\gamma_{\min}`.
        warmup_decay: Factor with which the line begins, d.

    Returns:
        The scheduler; call its ``step()`` after each step of the optimizer.

    Raises:
        ArgumentError: A value that cannot be.

    Example:
        >>> import asyncddp as bf, torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = bf.lr_scheduler_fn_cosine_with_warmup(optimizer, 2, 2, 0.0, 0.5)
        >>> for _ in range(5):
        ...     print(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     scheduler.step()
        0.5
        0.75
        1.0
        0.5
        0.0

    References:
        Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017.
    """
    caller = "lr_scheduler_fn_cosine_with_warmup"
    checked_integer(f"{caller}: argument t_max", t_max, 1)
    checked_integer(f"{caller}: argument t_warmup", t_warmup, 0)
    if not 0.0 <= warmup_decay <= 1.0:
        raise ArgumentError(
            f"{caller}: argument warmup_decay: expected a number between 0 and 1, got "
            f"{warmup_decay!r}"
        )

    def factor_for(base: float) -> Callable[[int], float]:
        lowest = cosine_eta_min / base if base else 1.0

        def factor(t: int) -> float:
            if t < t_warmup:
                return warmup_decay + (1.0 - warmup_decay) * t / t_warmup
            angle = math.pi * min(t - t_warmup, t_max) / t_max
            return lowest + (1.0 - lowest) * (1.0 + math.cos(angle)) / 2.0

        return factor

    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return LambdaLR(optimizer, [factor_for(base) for base in bases])


def _groups(
    caller: str, params: Iterable[tuple[str, torch.Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split parameters into groups with and without weight decay; drop empty groups."""
    decaying: list[torch.Tensor] = []
    spared: list[torch.Tensor] = []
    for entry in [params] if isinstance(params, torch.Tensor) else params:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ArgumentError(
                f"{caller}: argument params: expected (name, parameter) pairs such as "
                f"model.named_parameters(), got {type(entry).__name__}"
            )
        name, parameter = entry
        (spared if parameter.ndim <= 1 or name.endswith("bias") else decaying).append(parameter)
    if not decaying and not spared:
        raise ArgumentError(f"{caller}: argument params: expected at least one parameter, got none")
    groups = [(decaying, weight_decay), (spared, 0.0)]
    return [{"params": part, "weight_decay": decay} for part, decay in groups if part]
