"""Modules that train in parallel, and what feeds them."""

from __future__ import annotations

from asyncddp.parallel.decentralized import DecentralizedDataParallel
from asyncddp.parallel.samplers import LocalStepRandomBatchSampler

__all__ = ["DecentralizedDataParallel", "LocalStepRandomBatchSampler"]
