"""Names of the methods compared over slow links, and ours as arguments of the optimizer."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ALLREDUCE",
    "ASYNC",
    "BYTEGRAD",
    "DDP",
    "DDP_HALF",
    "DDP_POWER",
    "GOSSIP",
    "LOCAL",
    "LOW_PRECISION",
    "METHODS",
    "RATE",
    "RATES",
]

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
