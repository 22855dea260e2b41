"""Training steps by every averaging method, on a model of a given size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

import asyncddp as bf
from asyncddp import topology

__all__ = ["BY_MPI", "LIMITS", "LOCAL", "METHODS", "OVER_GLOO", "TrainingRun"]

_BATCH = 4
_Module: TypeAlias = torch.nn.Module
_Optimizer: TypeAlias = torch.optim.Optimizer
Wrap = Callable[[_Module, _Optimizer], tuple[_Module, _Optimizer]]


class TrainingRun:
    """Training of square linear layers by SGD with momentum, whose state is one more model."""

    def __init__(self, layers: int, width: int, wrap: Wrap) -> None:
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
        sgd = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self._model, self._optimizer = wrap(self.net, sgd)
        self._batch = torch.randn(_BATCH, width)

    def go(self, steps: int) -> None:
        """Make so many steps."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss = self._model(self._batch).square().mean()
            loss.backward()
            self._optimizer.step()


def _ours(algorithm: str, *, in_backward: bool = False, megabytes: float | None = None) -> Wrap:
    def wrap(net: _Module, sgd: _Optimizer) -> tuple[_Module, _Optimizer]:
        schedule = topology.one_peer_exponential(bf.size())
        return net, bf.DistributedOptimizer(
            sgd,
            net,
            algorithm,
            topology=None if algorithm == "gradient_allreduce" else schedule,
            update_in_backward=in_backward,
            communication_buffer_in_mb=megabytes,
        )

    return wrap


def _ddp(*, views: bool = False) -> Wrap:
    def wrap(net: _Module, sgd: _Optimizer) -> tuple[_Module, _Optimizer]:
        ddp = torch.nn.parallel.DistributedDataParallel
        return ddp(net, gradient_as_bucket_view=views), sgd

    return wrap


_SMALL = 8.0  # MiB
LOCAL = "local step"
BY_MPI = {
    "one-peer AWC by MPI": _ours("adapt_with_combine"),
    "one-peer ATC by MPI": _ours("adapt_then_combine"),
    "one-peer AWC by MPI, buffer of 8 MiB": _ours("adapt_with_combine", megabytes=_SMALL),
    "one-peer ATC by MPI, buffer of 8 MiB": _ours("adapt_then_combine", megabytes=_SMALL),
}
"""Those in which ranks of one machine exchange messages, as between machines."""
METHODS: dict[str, Wrap] = {
    LOCAL: lambda net, sgd: (net, sgd),
    "one-peer AWC": _ours("adapt_with_combine"),
    "one-peer ATC": _ours("adapt_then_combine"),
    "one-peer ATC in backward": _ours("adapt_then_combine", in_backward=True),
    **BY_MPI,
    "gradient_allreduce": _ours("gradient_allreduce"),
    "DDP gloo": _ddp(),
    "DDP gloo, gradient_as_bucket_view": _ddp(views=True),
}
OVER_GLOO = ("DDP gloo", "DDP gloo, gradient_as_bucket_view")
LIMITS = {
    "one-peer AWC": 0.25,
    "one-peer ATC": 0.25,
    "one-peer ATC in backward": 0.25,
    "one-peer AWC by MPI, buffer of 8 MiB": 0.25,
    "one-peer ATC by MPI, buffer of 8 MiB": 0.25,
}
"""Most memory that is aimed at beyond a local step's, in models."""
