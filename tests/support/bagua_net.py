"""Bagua's toy net with its data, and an optimizer that is written from a formula.

Whatever follows from a rank or a step does so from a seed alone: ranks that are threads share
torch's own generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

STEPS, BATCH, LR = 10, 4, 0.01

Tensors: TypeAlias = list[torch.Tensor]
Make: TypeAlias = Callable[[Any], torch.optim.Optimizer]

sgd: Make = partial(torch.optim.SGD, lr=LR)
momentum_sgd: Make = partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.01)


class Net(torch.nn.Module):
    """The net of Bagua's tests: 2 to 10 to 50 to 4, ReLU between, softmax at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(2, 10, bias=False)
        self.fc2 = torch.nn.Linear(10, 50)
        self.fc3 = torch.nn.Linear(50, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc2(torch.relu(self.fc1(x))))
        return torch.softmax(self.fc3(x), dim=1)


def net(seed: int) -> Net:
    """A net whose parameters follow from a seed alone: ranks that are threads share torch's."""
    model, generator = Net(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = parameter.shape[-1] ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
    return model


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and random targets of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(BATCH, 2, generator=generator), torch.randn(BATCH, 4, generator=generator)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of a rank in a step."""
    data, target = batch(rank, step)
    return torch.nn.functional.mse_loss(model(data), target)


def vector(model: torch.nn.Module) -> torch.Tensor:
    """A copy of all parameters in one vector."""
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


class FrozenAdam(torch.optim.Optimizer):
    """Adam with L2 decay, whose v stays as it is from step W on, and where it is 0, m stays 0."""

    def __init__(
        self,
        params: Any,
        warmup: int,
        betas: tuple[float, float] = (0.9, 0.999),
        decay: float = 0.0,
    ) -> None:
        super().__init__(params, {})
        self.s, self._warmup, self._betas, self._decay = 0, warmup, betas, decay
        self.x: Tensors = self.param_groups[0]["params"]
        self.m, self.v = [[torch.zeros_like(one) for one in self.x] for _ in "mv"]

    @property
    def warming_up(self) -> bool:
        """Whether the next step changes v."""
        return self.s + 1 < self._warmup

    def next_momentum(self, gradients: Sequence[torch.Tensor]) -> Tensors:
        """β₁ m + (1 - β₁) g."""
        pairs = zip(self.m, gradients, strict=True)
        return [torch.lerp(m, g, 1 - self._betas[0]) for m, g in pairs]

    @torch.no_grad()
    def step(self, momentum: Sequence[torch.Tensor] | None = None) -> None:  # type: ignore[override]
        """Make a step with m, or with the gradients."""
        warming, (beta1, beta2) = self.warming_up, self._betas
        self.s += 1
        g = [one.grad for one in self.x]
        if warming:
            g = [one + self._decay * at for one, at in zip(g, self.x, strict=True)]
            self.v = [beta2 * v + (1 - beta2) * one * one for v, one in zip(self.v, g, strict=True)]
        self.m = self.next_momentum(g) if momentum is None else list(momentum)
        if not warming:
            self.m = [torch.where(v > 0, m, 0.0) for m, v in zip(self.m, self.v, strict=True)]
        first, second = 1 - beta1**self.s, 1 - beta2**self.s
        for x, m, v in zip(self.x, self.m, self.v, strict=True):
            x -= LR / first * m / (v.sqrt() / second**0.5 + 1e-8)
