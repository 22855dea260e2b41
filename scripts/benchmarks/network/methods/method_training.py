"""Methods compared over slow links: DDP with and without its hooks, and ours with compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import asyncddp as bf
from benchmarks.network.methods.digits_training import BUCKET_MB, DigitsTraining
from benchmarks.tables import RivalUnavailableError

LOCAL = "local step"
DDP, DDP_HALF, DDP_POWER = "DDP gloo", "DDP gloo, fp16 hook", "DDP gloo, PowerSGD hook"
ALLREDUCE, BYTEGRAD = "gradient_allreduce", "bytegrad"
GOSSIP, ASYNC = "decentralized, shift_one", "async_model_average"
LOW_PRECISION = "low_precision_decentralized"

METHODS: dict[str, dict[str, Any] | None] = {
    DDP: None,
    DDP_HALF: None,
    DDP_POWER: None,
    ALLREDUCE: {"algorithm": "gradient_allreduce"},
    "gradient_allreduce, fp16": {"algorithm": "gradient_allreduce", "compression": "fp16"},
    "gradient_allreduce, power_sgd": {"algorithm": ALLREDUCE, "compression": "power_sgd"},
    BYTEGRAD: {"algorithm": "bytegrad"},
    "qadam": {"algorithm": "qadam"},
    GOSSIP: {"algorithm": "decentralized", "peer_selection_mode": "shift_one"},
    LOW_PRECISION: {"algorithm": "low_precision_decentralized"},
    "choco_sgd": {"algorithm": "choco_sgd"},
    "choco_sgd, sign": {"algorithm": "choco_sgd", "compression": "sign"},
    ASYNC: {"algorithm": "async_model_average", "sync_interval_ms": 100.0},
}
"""By name: arguments of ``DistributedOptimizer``, or None for what is not ours."""

RATE = 0.02
RATES = {"qadam": 1e-3}
"""Step sizes to learn the digits with, by name, where they are not ``RATE``."""

_MOMENTUM = 0.9
_EPS = 1e-4  # with 1e-8, what 8 bits lose of a momentum becomes large steps where v is small
_POWER_RANK = 4  # of both PowerSGDs
_ONE_BUCKET_MB = 100  # PowerSGD's hook waits on gloo's two threads: two buckets at once never end


@dataclass(frozen=True)
class ComparedTraining:
    """A method at work on a model of its own.

    Attributes:
        digits: The model and its data.
        module: The model, or what wraps it.
        optimizer: The optimizer, or what wraps it.
        waits: Whether a step waits for other ranks, so that all make equally many.
    """

    digits: DigitsTraining
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    waits: bool = True

    def step(self) -> None:
        """Make one step of training."""
        self.optimizer.zero_grad()
        self.digits.backward(self.module)
        self.optimizer.step()

    def proceed(self) -> None:
        """Communicate again, before the first step of a turn; all ranks call this."""
        if self._goes_on:
            self.optimizer.resume()  # type: ignore[attr-defined]

    def pause(self) -> None:
        """End what goes on between steps, so that others can be measured; all ranks call this."""
        if self._goes_on:
            self.optimizer.abort()  # type: ignore[attr-defined]

    @property
    def _goes_on(self) -> bool:
        """True if averages begin and end by the clock."""
        return isinstance(self.optimizer, bf.DistributedOptimizer) and not self.waits

    @property
    def payload(self) -> int | None:
        """Bytes that our optimizer says it has sent; None for the rivals."""
        wrapped = isinstance(self.optimizer, bf.DistributedOptimizer)
        return self.optimizer.bytes_sent if wrapped else None  # type: ignore[attr-defined]


def prepare(
    name: str, digits: DigitsTraining, gloo: str | None, warmup: int, rate: float
) -> ComparedTraining:
    """Prepare a method; collective.

    Args:
        name: One of ``METHODS``, or ``LOCAL``.
        digits: Model and data.
        gloo: Why gloo cannot be used, or None where it can.
        warmup: Steps until ``qadam`` and DDP's PowerSGD begin to compress.
        rate: Step size.

    Raises:
        RivalUnavailableError: It is one of DDP's, and gloo does not start.
    """
    own = METHODS.get(name)
    if own is not None:
        return _ours(own, digits, warmup, rate)
    optimizer = torch.optim.SGD(digits.model.parameters(), lr=rate, momentum=_MOMENTUM)
    if name == LOCAL:
        return ComparedTraining(digits, digits.model, optimizer, waits=False)
    if gloo is not None:
        raise RivalUnavailableError(gloo)
    cap = BUCKET_MB if name != DDP_POWER else _ONE_BUCKET_MB
    module = torch.nn.parallel.DistributedDataParallel(digits.model, bucket_cap_mb=cap)
    _HOOKS[name](module, warmup)
    return ComparedTraining(digits, module, optimizer)


def _ours(
    given: dict[str, Any], digits: DigitsTraining, warmup: int, rate: float
) -> ComparedTraining:
    model, options = digits.model, dict(given)
    algorithm = options.pop("algorithm")
    optimizer: torch.optim.Optimizer
    if algorithm == "qadam":
        optimizer = bf.QAdamOptimizer(
            model.parameters(), rate, warmup, eps=_EPS, freeze_bias_correction=True
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=_MOMENTUM)
    wrapper = bf.DistributedOptimizer(
        optimizer, model, algorithm, bucket_size_in_mb=BUCKET_MB, **options
    )
    return ComparedTraining(digits, model, wrapper, waits=algorithm != ASYNC)


def _power_hook(module: torch.nn.parallel.DistributedDataParallel, warmup: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, _POWER_RANK, start_powerSGD_iter=warmup)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _half_hook(module: torch.nn.parallel.DistributedDataParallel, warmup: int) -> None:
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)


_HOOKS: dict[str, Callable[[torch.nn.parallel.DistributedDataParallel, int], None]] = {
    DDP: lambda module, warmup: None,
    DDP_HALF: _half_hook,
    DDP_POWER: _power_hook,
}
