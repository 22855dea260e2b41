"""Training without the library: W, the plain optimizer, all ranks one after the other.

The rule of a method is three lines here; what the library's rank r computes in parallel, with
buckets, hooks and messages, must equal ``train_by_matrix(...)[r]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import asyncddp as bf
from asyncddp import topology

METHODS = ("adapt_with_combine", "adapt_then_combine", "gradient_allreduce")
PARAMETER_METHODS = METHODS[:2]


def batch(rank: int, step: int, inputs: int = 4, rows: int = 5) -> torch.Tensor:
    """The data of a rank in a step, which differ between ranks."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, inputs, generator=generator, dtype=torch.float64) + rank


def mlp(rank: int, bias: bool = True) -> torch.nn.Module:
    """A small model whose parameters differ between ranks."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6, bias=bias, dtype=torch.float64),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 3, bias=bias, dtype=torch.float64),
    )
    return filled(model, rank)


M = TypeVar("M", bound=torch.nn.Module)


def filled(model: M, rank: int) -> M:
    """The model with random parameters of that rank; threads share torch's own generator."""
    generator = torch.Generator().manual_seed(100 + rank)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
            parameter.copy_(values)
    return model


def square_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with a gradient for every output."""
    return (model(x) - 1.0).square().mean()


def vector(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assign(model: torch.nn.Module, value: torch.Tensor) -> None:
    """Put a vector into the parameters."""
    start = 0
    for parameter in model.parameters():
        part = value[start : start + parameter.numel()]
        parameter.data.copy_(part.view_as(parameter))
        start += parameter.numel()


Make = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def train_by_matrix(
    method: str,
    graph: topology.GraphOrSchedule,
    make: Make,
    steps: int,
    *,
    model_of: Callable[[int], torch.nn.Module] = mlp,
    loss_of: Loss = square_loss,
    closure: bool = False,
    averages: Callable[[int], bool] = lambda step: True,
    travels: Callable[[int], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The parameters of all ranks after some steps.

    Args:
        method: Its name.
        graph: W of each round.
        make: Makes the plain optimizer of some parameters.
        steps: How many.
        model_of: Makes a rank's model.
        loss_of: Its loss on a batch.
        closure: Whether the optimizer takes a closure, and may evaluate it several times.
        averages: Whether step k averages.
        travels: In step k, which entries of the parameters' vector do; all if None.
    """
    schedule = topology.as_schedule(graph)
    models = [model_of(rank) for rank in range(schedule.n)]
    if method == "gradient_allreduce":
        for model in models:
            assign(model, vector(models[0]))
    optimizers = [make(model.parameters()) for model in models]
    rounds = 0
    for step in range(steps):
        w = torch.from_numpy(topology.mixing_matrix(schedule, rounds))
        if not averages(step):
            w = torch.eye(schedule.n, dtype=torch.float64)
        rounds += averages(step)
        if method == "gradient_allreduce":
            _central_step(models, optimizers, loss_of, step, closure=closure)
        elif method == "adapt_with_combine":
            mixed = _mixed(w, models, None if travels is None else travels(step))
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                _local_step(model, optimizer, loss_of, batch(rank, step), mixed[rank], closure)
        else:
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                _local_step(model, optimizer, loss_of, batch(rank, step), None, closure)
            mixed = _mixed(w, models, None if travels is None else travels(step))
            for model, row in zip(models, mixed, strict=True):
                assign(model, row)
    return [vector(model) for model in models]


def _mixed(
    w: torch.Tensor, models: Sequence[torch.nn.Module], travels: torch.Tensor | None
) -> torch.Tensor:
    """W X in the columns that travel, X in the others."""
    x = torch.stack([vector(model) for model in models])
    return w @ x if travels is None else torch.where(travels, w @ x, x)


def _local_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Loss,
    data: torch.Tensor,
    then: torch.Tensor | None,
    closure: bool,
) -> None:
    """Gradient where the model is; then the parameters become ``then``; then the update."""
    first = [True]

    def evaluate() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        if then is not None and first[0]:
            assign(model, then)
        first[0] = False
        return loss

    if closure:
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()


def _central_step(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Loss,
    step: int,
    *,
    closure: bool,
) -> None:
    """The mean gradient at the common point, for one optimizer; the others follow."""
    model = models[0]

    def evaluate() -> torch.Tensor:
        gradients, losses = [], []
        for rank in range(len(models)):
            model.zero_grad()
            loss = loss_of(model, batch(rank, step))
            loss.backward()
            losses.append(loss.detach())
            gradients.append([p.grad for p in model.parameters()])
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            used = [part for part in parts if part is not None]
            parameter.grad = sum(used) / len(models) if used else None
        return torch.stack(losses).sum() / len(models)

    if closure:
        optimizers[0].step(evaluate)
    else:
        evaluate()
        optimizers[0].step()
    for other in models[1:]:
        assign(other, vector(model))


def train_here(
    method: str,
    graph: topology.GraphOrSchedule,
    make: Make,
    steps: int,
    *,
    model_of: Callable[[int], torch.nn.Module] = mlp,
    loss_of: Loss = square_loss,
    closure: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The same with the library, on this rank; its parameters after some steps."""
    model = model_of(0 if method == "gradient_allreduce" else bf.rank())
    optimizer = bf.DistributedOptimizer(
        make(model.parameters()), model, method, topology=graph, **options, broadcast=False
    )

    for step in range(steps):
        data = batch(bf.rank(), step)

        def evaluate(data: torch.Tensor = data) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    return vector(model)


class SkippingOnce(torch.optim.SGD):
    """Makes no update in some calls."""

    skips: tuple[int, ...] = ()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return None if self.calls - 1 in self.skips else super().step(closure)


class Late(torch.optim.SGD):
    """Takes the parameters after the second into a group of their own in its third step."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__([{"params": parameters[:2], "lr": 0.05}], lr=0.1)
        self.late, self.calls = parameters[2:], 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 3:
            self.add_param_group({"params": self.late, "weight_decay": 0.1})
        return super().step(closure)
