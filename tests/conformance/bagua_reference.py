"""The toy problem of Bagua's tests, and simulations of its algorithms in one process."""

from __future__ import annotations

import copy

import torch

STEPS, BATCH, LR = 10, 4, 0.01


class Net(torch.nn.Module):
    """2 → 10 → 50 → 4, with a bias in the middle alone."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(2, 10, bias=False)
        self.fc2 = torch.nn.Linear(10, 50, bias=True)
        self.fc3 = torch.nn.Linear(50, 4, bias=False)

    def forward(self, x):
        x = torch.relu(self.fc2(torch.relu(self.fc1(x))))
        return torch.softmax(self.fc3(x), dim=1)


def net(seed):
    """A model that a seed determines."""
    model = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def batches(rank, steps=STEPS):
    """Inputs and goals of a rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(BATCH, 2, generator=generator), torch.randn(BATCH, 4, generator=generator))
        for _ in range(steps)
    ]


def gradient_step(model, optimizer, x, goal):
    """What the user's loop does."""
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), goal).backward()
    optimizer.step()


def train(model, optimizer, rank, steps=STEPS):
    """Make steps with the data of a rank."""
    for x, goal in batches(rank, steps):
        gradient_step(model, optimizer, x, goal)


def flat(model):
    """All parameters in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def simulate(ranks, mix, steps=STEPS, lr=LR, average=True):
    """Train models of so many ranks by SGD, all from seed 0.

    Args:
        ranks: Number of ranks.
        mix: None averages, or sums, gradients; otherwise ``mix(step, vectors)`` gives the vectors
            of parameters to which the gradients, taken before, are applied.
        steps: Number of steps.
        lr: The step size.
        average: Whether gradients are averaged; otherwise they are summed.
    """
    models = [copy.deepcopy(net(0)) for _ in range(ranks)]
    data = [batches(rank, steps) for rank in range(ranks)]
    for step in range(steps):
        gradients = []
        for model, rows in zip(models, data, strict=True):
            model.zero_grad()
            x, goal = rows[step]
            torch.nn.functional.mse_loss(model(x), goal).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        vectors = [flat(model) for model in models]
        if mix is None:
            total = torch.stack(gradients).sum(0) / (ranks if average else 1)
            gradients = [total] * ranks
        else:
            vectors = mix(step, vectors)
        for model, vector, gradient in zip(models, vectors, gradients, strict=True):
            torch.nn.utils.vector_to_parameters(vector - lr * gradient, model.parameters())
    return [flat(model) for model in models]
