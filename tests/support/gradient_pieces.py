"""Models whose parameters get their gradients in pieces, from backward passes inside of a pass."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

WIDTH = 4
KINDS = ("shared", "mixed", "varying", "reversible")


class _Reversible(torch.autograd.Function):
    """Adds what a block makes of the second half to the first; keeps its output alone."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        with torch.no_grad():
            y = coupled(x, block)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        second, first = y.chunk(2, dim=1)
        with torch.no_grad():
            x = torch.cat([first - ctx.block(second), second], dim=1)
        with torch.enable_grad():
            x.requires_grad_()
            torch.autograd.backward(coupled(x, ctx.block), gradient)
        return x.grad, None


def coupled(x, block):
    """A coupling layer, whose halves change places."""
    first, second = x.chunk(2, dim=1)
    return torch.cat([second, first + block(second)], dim=1)


class InPieces(torch.nn.Module):
    """A block that is used again and again, and layers around it that are used once.

    Args:
        kind: ``"shared"`` uses it three times, each in a checkpoint; ``"mixed"`` once more behind,
            without one; ``"varying"`` in each pass as often as that says; ``"reversible"`` in
            layers that keep their outputs alone.
        nested: Whether there are backward passes inside of a pass; otherwise autograd sums pieces.
    """

    def __init__(self, kind: str, *, nested: bool) -> None:
        super().__init__()
        self.kind, self.nested, self.passes = kind, nested, 0
        width = WIDTH // 2 if kind == "reversible" else WIDTH
        self.first = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.block = torch.nn.Linear(width, width, dtype=torch.float64)
        self.last = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "reversible":
            return _Reversible.apply(x, self.block) if self.nested else coupled(x, self.block)
        return checkpoint(self.block, x, use_reentrant=True) if self.nested else self.block(x)

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(times if self.kind == "varying" else 3):
            x = self.again(x)
        if self.kind in ("mixed", "varying"):
            x = self.block(x)
        return self.last(x)


def loss_of(model: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    """The loss of a rank's batch of that number; ranks vary how often they use the block."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    return model(x, (number * (1 + rank)) % 4).square().mean()


def vector(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector, a copy."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_in_one_process(kind: str, ranks: int, steps: int, lr: float, passes: int = 1):
    """Parameters after SGD with the ranks' mean gradients, accumulated over so many passes."""
    model = InPieces(kind, nested=False)
    sgd = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        sgd.zero_grad()
        for rank in range(ranks):
            for number in range(step * passes, (step + 1) * passes):
                (loss_of(model, rank, number) / ranks).backward()
        sgd.step()
    return vector(model)
