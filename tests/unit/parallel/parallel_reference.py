"""Training with and without DecentralizedDataParallel: the same losses, W and the plain optimizer.

``simulate(...)[r]`` is what rank r's ``train_here(...)`` must give.
"""

from __future__ import annotations

import torch

import asyncddp as bf
from asyncddp import topology
from tests.unit.optim.optim_reference import assign, batch, filled, mlp, square_loss, vector

__all__ = [
    "assert_all_close",
    "assign",
    "batch",
    "convnet",
    "filled",
    "image_loss",
    "in_turns",
    "make_ddp",
    "mlp",
    "of_batch",
    "simulate",
    "square_loss",
    "train_here",
    "vector",
]


def of_batch(model, rank, step):
    """The usual loss of a rank in a step."""
    return square_loss(model, batch(rank, step))


def convnet(rank):
    """Convolutions that lie channels last, and batch normalisation."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, dtype=torch.float64),
        torch.nn.BatchNorm2d(4, dtype=torch.float64),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 3, dtype=torch.float64),
    ).to(memory_format=torch.channels_last)
    return filled(model, rank)


def image_loss(model, rank, step):
    """Its loss on small images."""
    x = batch(rank, step, inputs=2 * 16, rows=6).view(6, 2, 4, 4)
    return square_loss(model, x.contiguous(memory_format=torch.channels_last))


def simulate(graph, make, steps, *, model_of=mlp, loss_of=of_batch, before=None, mixes=None):
    """X+ = W X − U for all ranks, one after the other.

    Args:
        graph: W of each round.
        make: Makes the plain optimizer of parameters.
        steps: How many.
        model_of: Makes a rank's model.
        loss_of: ``loss_of(model, rank, step)``.
        before: ``before(step, models)`` is called before each step.
        mixes: ``mixes(step)`` gives the matrix of a step, in place of ``graph``'s.
    """
    w_of = mixes or (
        lambda k: torch.from_numpy(topology.mixing_matrix(topology.as_schedule(graph), k))
    )
    models = [model_of(rank) for rank in range(len(w_of(0)))]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(steps):
        if before is not None:
            before(step, models)
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        mixed = w_of(step) @ torch.stack([vector(model).double() for model in models])
        for model, optimizer, row in zip(models, optimizers, mixed, strict=True):
            assign(model, row)
            optimizer.step()
    return [vector(model) for model in models]


def make_ddp(model, make, **options):
    """The wrapper, with one plain optimizer for each bucket; ranks keep their own start."""
    return bf.DecentralizedDataParallel(
        model, lambda named: make([p for _, p in named]), **{"broadcast": False, **options}
    )


def in_turns(make):
    """Such optimizers, whose steps wait until all ranks have mixed what they step with."""

    def made(parameters):
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(lambda *_: bf.barrier())
        return optimizer

    return made


def train_here(graph, make, steps, *, model_of=mlp, loss_of=of_batch, lockstep=False, **options):
    """The same with the library, on this rank.

    ``lockstep`` waits for all ranks between mixing and update, and after each step, so that what is
    latest in a window is what the last step has made.
    """
    model = model_of(bf.rank())
    ddp = make_ddp(model, in_turns(make) if lockstep else make, topology=graph, **options)
    for step in range(steps):
        loss_of(ddp, bf.rank(), step).backward()
        if lockstep:
            bf.win_flush()
            bf.barrier()
    assert ddp.steps == steps
    assert all(p.grad is None for p in model.parameters())
    return vector(model)


def assert_all_close(got, expected):
    """Equal up to the rounding of double precision."""
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
