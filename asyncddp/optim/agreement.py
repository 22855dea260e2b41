"""Whether all ranks hold the same model and settings, found out once, before training."""

from __future__ import annotations

import hashlib
from typing import Any

from asyncddp.algorithms.mixer import Mixer
from asyncddp.algorithms.rhythms import Setting
from asyncddp.context import Context
from asyncddp.ops import agreement
from topology import as_schedule

__all__ = ["agree", "facts_of"]

_ROUNDS = 8  # of a topology that varies in time, which are compared in check mode


def facts_of(setting: Setting, update_in_backward: bool) -> list[str]:
    """What must be equal on all ranks."""
    mixer = setting.mixer
    facts = [
        f"algorithm {mixer.algorithm.name!r}",
        f"communication {mixer.communication.name!r}",
        f"num_steps_per_communication={setting.every}",
        f"bucket size {setting.cap} bytes",
        f"update_in_backward={update_in_backward}",
        f"wrapper {mixer.label!r}",
        f"scale_steps={mixer.windows.scales_steps}",
    ]
    if mixer.context.config.check:
        facts.append(_weights_of(mixer))
    return facts + [
        f"parameter {name} of shape {tuple(parameter.shape)}, strides {parameter.stride()}, "
        f"{parameter.dtype}"
        for name, parameter in setting.trainable()
    ]


def _weights_of(mixer: Mixer) -> str:
    """The weights of all ranks in the first rounds of the topology in use, in few words."""
    given = mixer.topology or mixer.communication.inherited(mixer.context)
    if given is None:
        return "no topology"
    schedule = as_schedule(given)
    rounds = range(_ROUNDS if schedule.period is None else min(_ROUNDS, schedule.period))
    graphs = [schedule.graph(k) for k in rounds]
    weights: list[Any] = [sorted(graph.edges(data="weight")) for graph in graphs]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:12]
    return f"topology {schedule.name} with the weights {digest}"


def agree(context: Context, facts: list[str]) -> None:
    """Compare facts over all ranks; collective.

    Args:
        context: The world.
        facts: Sentences about this rank, in an order that does not depend on it.

    Raises:
        MismatchError: On every rank, if any two differ; the message shows the first difference.
    """
    agreement.agree(
        context, "DistributedOptimizer needs the same model and settings on all ranks", facts
    )
