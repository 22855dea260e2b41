"""Describes the settings of DistributedOptimizer that must be equal on all ranks, to compare."""

from __future__ import annotations

import hashlib
from typing import Any

from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases import PhaseConfig
from topology import as_schedule

_ROUNDS = 8  # rounds of a time-varying topology that are compared in check mode


def describe_settings(config: PhaseConfig, update_in_backward: bool) -> list[str]:
    """List the settings that must be equal on all ranks, as sentences."""
    averager = config.averager
    facts = [
        f"algorithm {averager.algorithm.name!r}",
        f"communication {averager.communication.name!r}",
        f"num_steps_per_communication={config.passes_per_round}",
        f"bucket size {config.bucket_bytes} bytes",
        f"update_in_backward={update_in_backward}",
        f"wrapper {averager.label!r}",
        f"scale_steps={averager.windows.scales_steps}",
    ]
    if averager.context.config.check:
        facts.append(_describe_weights(averager))
    return facts


def _describe_weights(averager: ModelAverager) -> str:
    """Describe the topology in use, with a hash of its weights in the first rounds."""
    given = averager.topology or averager.communication.context_topology(averager.context)
    if given is None:
        return "no topology"
    schedule = as_schedule(given)
    rounds = range(_ROUNDS if schedule.period is None else min(_ROUNDS, schedule.period))
    graphs = [schedule.graph(k) for k in rounds]
    weights: list[Any] = [sorted(graph.edges(data="weight")) for graph in graphs]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:12]
    return f"topology {schedule.name} with the weights {digest}"
