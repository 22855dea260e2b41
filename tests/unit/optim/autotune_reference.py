"""Training of a small model under a search whose fastest candidate is known beforehand."""

from __future__ import annotations

import time

import torch

import asyncddp as bf
from tests.unit.optim.optim_reference import batch, mlp, square_loss, vector

SIZES = (3e-4, 1e-5)
"""MiB by which the model lies in two and in four buckets; it lies in one by default."""
FOUR = 1e-5


def short(**options):
    """Settings of a search that is over in a few steps, and says nothing."""
    return bf.Autotune(
        **{
            "steps_per_trial": 2,
            "warmup_steps": 1,
            "bucket_sizes_in_mb": SIZES,
            "show": False,
            **options,
        }
    )


def sgd(model):
    """The plain optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def buckets_of(optimizer):
    """Elements of each bucket that travels."""
    return [bucket.flat.numel() for bucket in optimizer._averager.buckets]


def one_step(optimizer, model, step):
    """Forward, backward and step on this rank's data of a step."""
    optimizer.zero_grad()
    square_loss(model, batch(bf.rank(), step).to(next(model.parameters()).device)).backward()
    optimizer.step()


def wrapped(algorithm="adapt_then_combine", *, rank=None, autotune=None, device="cpu", **options):
    """A model of this rank, or the same on all, and its distributed optimizer."""
    alike = algorithm in ("gradient_allreduce", "bytegrad")
    model = mlp(0 if alike else bf.rank() if rank is None else rank).to(device)
    optimizer = bf.DistributedOptimizer(
        sgd(model), model, algorithm, autotune=autotune, **options, broadcast=False
    )
    return model, optimizer


def search(optimizer, model, slow=lambda buckets: 0.0, limit=1000):
    """Train until the search is over; gives the buckets in use before each step.

    ``slow(buckets)`` are the seconds that a step takes longer.
    """
    seen = []
    while not optimizer.autotune.done and len(seen) < limit:
        seen.append(buckets_of(optimizer))
        time.sleep(slow(len(seen[-1])))
        one_step(optimizer, model, len(seen))
    return seen


def trained(algorithm, steps, *, autotune=None, **options):
    """Parameters, counters and whether the search has ended, after some steps."""
    model, optimizer = wrapped(algorithm, autotune=autotune, **options)
    for step in range(steps):
        one_step(optimizer, model, step)
    over = optimizer.autotune is None or optimizer.autotune.done
    return vector(model), optimizer.round, optimizer.steps, over
