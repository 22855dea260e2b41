"""Training with unequal numbers of batches: by a reference, and with the library.

The reference keeps all ranks' parameters in one matrix; what the ranks compute must equal its rows.
"""

from __future__ import annotations

import numpy as np
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.algorithms.method_traits import JoinedRanks

LR, MOMENTUM = 0.05, 0.9
BATCHES = (3, 5, 8, 13)
MIXING = ("adapt_with_combine", "adapt_then_combine")


def batch(rank, step):
    """Inputs and targets, other ones for every rank and step."""
    random = np.random.default_rng([rank, step])
    return random.standard_normal((5, 6)), random.standard_normal(5) + rank


def starts(n, alike):
    """Row r: the parameters from which rank r starts."""
    ranks = [0] * n if alike else range(n)
    return np.stack([np.random.default_rng([77, rank]).standard_normal(6) for rank in ranks])


def begin_alike(method):
    """Whether all ranks must begin from one model."""
    kind = ALGORITHMS[method]
    return method == "gradient_allreduce" or kind.joined_ranks is JoinedRanks.FOLLOW


def moved(w, training):
    """W', in which those who train keep what they would give to the others."""
    result = np.eye(len(w))
    for i in training:
        result[i] = 0.0
        for j in range(len(w)):
            result[i, j if j in training else i] += w[i, j]
    return result


def mean_of(n, training):
    """The matrix that averages over those who train."""
    result = np.eye(n)
    for i in training:
        result[i] = [float(j in training) / len(training) for j in range(n)]
    return result


class Reference:
    """SGD with momentum of all ranks, one after the other."""

    def __init__(self, method, graph, n, every=1):
        self.method, self.n, self.every = method, n, every
        self.schedule = None if graph is None else topology.as_schedule(graph)
        self.x = starts(n, begin_alike(method))
        self.momentum = np.zeros_like(self.x)
        self.rounds = self.carried = 0

    def matrix(self, training):
        if self.schedule is None:
            return mean_of(self.n, training)
        return moved(topology.mixing_matrix(self.schedule, self.rounds), training)

    def epoch(self, batches):
        for step in range(max(batches)):
            training = [rank for rank in range(self.n) if step < batches[rank]]
            gradients = np.zeros_like(self.x)
            for rank in training:
                a, y = batch(rank, step)
                gradients[rank] = 2 / len(y) * a.T @ (a @ self.x[rank] - y)
            averages = (self.carried + step + 1) % self.every == 0
            self.step(training, gradients, averages)
        self.carried = (self.carried + max(batches)) % self.every
        if self.method == "gradient_allreduce" and max(batches):
            last = int(np.argmax(batches))
            self.x[:], self.momentum[:] = self.x[last], self.momentum[last]
        return self

    def step(self, training, gradients, averages):
        w = self.matrix(training) if averages else np.eye(self.n)
        self.rounds += averages
        if self.method == "gradient_allreduce":
            gradients = w @ gradients
        self.momentum[training] = MOMENTUM * self.momentum[training] + gradients[training]
        if self.method == "adapt_with_combine":
            self.x = w @ self.x
        self.x[training] -= LR * self.momentum[training]
        if self.method == "adapt_then_combine":
            self.x = w @ self.x


# the same with the library


class Two(torch.nn.Module):
    """A linear function with its weights in two parameters, so that there can be two buckets."""

    def __init__(self, values):
        super().__init__()
        self.first = torch.nn.Parameter(torch.from_numpy(values[:2].copy()))
        self.second = torch.nn.Parameter(torch.from_numpy(values[2:].copy()))

    def forward(self, a):
        return a[:, :2] @ self.first + a[:, 2:] @ self.second

    def vector(self):
        return torch.cat([self.first.detach(), self.second.detach()]).numpy().copy()


def made(method, **options):
    """This rank's model and its distributed optimizer, with one bucket for each parameter."""
    model = Two(starts(bf.size(), begin_alike(method))[bf.rank()])
    plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    return model, bf.DistributedOptimizer(
        plain, model, method, bucket_size_in_mb=1e-6, **options, broadcast=False
    )


def loss_of(model, step):
    a, y = map(torch.from_numpy, batch(bf.rank(), step))
    return (model(a) - y).square().mean()


def train_epoch(model, optimizer, batches):
    for step in range(batches):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def joined(method, epochs, broadcast_last=False, **options):
    """Epochs of unequal numbers of batches, each in a block of its own."""
    model, optimizer = made(method, **options)
    for batches in epochs:
        with bf.join(optimizer, broadcast_last=broadcast_last):
            train_epoch(model, optimizer, batches[bf.rank()])
    return model.vector(), optimizer.counters


def check(got, reference):
    """Parameters of all ranks, and the counters, which are equal everywhere."""
    np.testing.assert_allclose(np.stack([x for x, _ in got]), reference.x, rtol=1e-12, atol=1e-12)
    expected = {"round": reference.rounds, "passes": reference.carried}
    assert [counters for _, counters in got] == [expected] * len(got)
