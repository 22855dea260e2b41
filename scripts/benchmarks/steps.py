"""A training step of a small MLP: what communicating adds to the plain local step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import asyncddp as bf
import topology
from benchmarks.contract import Call, Rival, Table, World

__all__ = ["step_table"]

_INPUTS, _CLASSES, _BATCH = 64, 10, 32
Wrap = Callable[[torch.optim.Optimizer, torch.nn.Module], torch.optim.Optimizer]


def _mlp(width: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(_INPUTS, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, _CLASSES),
    )


def _nbytes(width: int) -> int:
    return sum(p.numel() * p.element_size() for p in _mlp(width).parameters())


def step_table(world: World, widths: Sequence[int]) -> Table:
    """One step (zero_grad, forward, backward, SGD with momentum), local and with each method."""
    width_of = {_nbytes(width): width for width in widths}
    schedule = topology.one_peer_exponential(world.size)

    def rival(name: str, wrap: Wrap) -> Rival:
        def prepare(nbytes: int) -> Call:
            model = _mlp(width_of[nbytes])
            inputs = torch.randn(_BATCH, _INPUTS)
            labels = torch.randint(_CLASSES, (_BATCH,))
            sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            optimizer = wrap(sgd, model)

            def call(number: int) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                return loss

            return call

        return Rival(name, prepare)

    return Table(
        "step",
        f"a step of an MLP, batch of {_BATCH}",
        list(width_of),
        (
            rival(
                "one-peer ATC",
                lambda sgd, model: bf.DistributedAdaptThenCombineOptimizer(
                    sgd, model=model, topology=schedule
                ),
            ),
            rival("plain local step", lambda sgd, model: sgd),
            rival(
                "one-peer AWC",
                lambda sgd, model: bf.DistributedAdaptWithCombineOptimizer(
                    sgd, model=model, topology=schedule
                ),
            ),
            rival(
                "gradient_allreduce",
                lambda sgd, model: bf.DistributedGradientAllreduceOptimizer(sgd, model=model),
            ),
        ),
        size_is="model",
    )
