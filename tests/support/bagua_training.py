"""Training of Bagua's toy net with the library, on each rank; its data are the simulation's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import asyncddp as bf
from tests.support.bagua_net import STEPS, Make, Tensors, loss_of, net, sgd, vector


class Trained(NamedTuple):
    """What a rank has after training.

    Attributes:
        vector: Its parameters.
        averages: Of each step the parameters just before the update.
        state: Of each bucket what the method keeps.
        optimizer_state: Of each parameter what the optimizer keeps.
    """

    vector: torch.Tensor
    averages: Tensors
    state: list[dict[str, torch.Tensor]]
    optimizer_state: list[dict[str, Any]]


class Run:
    """Training of this rank, in legs.

    Args:
        method: The first method.
        alike: Whether all ranks start from the same model.
        make: Makes the optimizer of some parameters.
        cap: Bytes of a bucket.
        batches: Batches of each rank, which come again and again.
        **options: Those of the wrapper.
    """

    def __init__(
        self,
        method: str,
        *,
        alike: bool = False,
        make: Make = sgd,
        cap: int = 25 << 20,
        batches: int = 1000,
        **options: Any,
    ) -> None:
        self._batches = batches
        self.model = net(0 if alike else bf.rank())
        self.plain = make(self.model.parameters())
        self.averages: Tensors = []
        self.step = 0
        self.plain.register_step_pre_hook(lambda *_: self.averages.append(vector(self.model)))
        self.optimizer = bf.DistributedOptimizer(
            self.plain,
            self.model,
            method,
            bucket_size_in_mb=cap / 2**20,
            broadcast=False,
            **options,
        )

    def train(self, steps: int = STEPS) -> None:
        """Make steps on this rank's data."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, bf.rank(), self.step % self._batches).backward()
            self.optimizer.step()
            self.step += 1

    def result(self) -> Trained:
        """What this rank has, as copies."""
        buckets = self.optimizer._averager.buckets
        return Trained(
            vector(self.model),
            self.averages,
            [{key: one.clone() for key, one in bucket.state.items()} for bucket in buckets],
            [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
                for state in (self.plain.state[one] for one in self.model.parameters())
            ],
        )


def train(method: str, steps: int = STEPS, **arguments: Any) -> Trained:
    """Train on this rank; the arguments are those of :class:`Run`."""
    run = Run(method, **arguments)
    run.train(steps)
    return run.result()


def assert_near(
    got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float
) -> None:
    """Fail where an element differs by more than a tolerance, of its size where that is above 1."""
    pairs = list(zip(got, wanted, strict=True))
    worst = max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)
    assert worst <= tolerance, f"{worst:.2g} is more than {tolerance:.2g}"


def vectors(ranks: Sequence[Trained]) -> Tensors:
    """The parameters of all ranks."""
    return [one.vector for one in ranks]


def all_equal(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    return all(torch.equal(one, tensors[0]) for one in tensors)
